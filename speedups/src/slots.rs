//! Objects of dataclasses with slots, read and made without running Python code.
//!
//! All of the unsafe code is in this file. It does what the `__init__` that `integr8s_idem._util.fast_dataclass`
//! generates does: it writes through the descriptors of the slots.

use pyo3::exceptions::PyTypeError;
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::PyType;

/// A class, and the descriptors of some of its slots, by index.
pub struct Slots {
    class: Py<PyType>,
    slots: Vec<Py<PyAny>>,
    get: ffi::descrgetfunc,
    set: ffi::descrsetfunc,
}

impl Slots {
    /// Look up the slots `names` of `class`.
    pub fn new(class: &Bound<'_, PyType>, names: &[&str]) -> PyResult<Self> {
        let py = class.py();
        let member = py.import("types")?.getattr("MemberDescriptorType")?;
        let attributes = class.getattr("__dict__")?;
        let mut slots = Vec::with_capacity(names.len());
        for name in names {
            let slot = attributes.get_item(name)?;
            if !slot.get_type().is(&member) {
                return Err(PyTypeError::new_err(format!("{name} is not a slot of {class}")));
            }
            slots.push(slot.unbind());
        }
        let kind = member.cast::<PyType>()?.as_type_ptr();
        // SAFETY: `kind` is the type of all slots, and defines both functions with these signatures; they are
        // checked for NULL by `Option`.
        let (get, set) = unsafe {
            (
                std::mem::transmute::<*mut std::ffi::c_void, Option<ffi::descrgetfunc>>(ffi::PyType_GetSlot(
                    kind,
                    ffi::Py_tp_descr_get,
                )),
                std::mem::transmute::<*mut std::ffi::c_void, Option<ffi::descrsetfunc>>(ffi::PyType_GetSlot(
                    kind,
                    ffi::Py_tp_descr_set,
                )),
            )
        };
        match (get, set) {
            (Some(get), Some(set)) => Ok(Self { class: class.clone().unbind(), slots, get, set }),
            _ => Err(PyTypeError::new_err("slots cannot be read and written")),
        }
    }

    /// Whether `object` is an object of exactly this class.
    pub fn describes(&self, object: &Bound<'_, PyAny>) -> bool {
        object.get_type_ptr().cast() == self.class.as_ptr()
    }

    /// Return the value of a slot; `None` if the object is of another class, or the slot is empty.
    pub fn get<'py>(&self, object: &Bound<'py, PyAny>, slot: usize) -> Option<Bound<'py, PyAny>> {
        let py = object.py();
        let slot = self.slots.get(slot)?;
        // SAFETY: all pointers are of live objects; the function checks the class of `object`, and returns a new
        // reference, or NULL with an exception, which is fetched.
        let found = unsafe {
            let value = (self.get)(slot.as_ptr(), object.as_ptr(), self.class.as_ptr());
            Bound::from_owned_ptr_or_err(py, value)
        };
        found.ok()
    }

    /// Make an object with `values` in the slots, in order.
    pub fn make<'py>(&self, py: Python<'py>, values: &[&Bound<'py, PyAny>]) -> PyResult<Bound<'py, PyAny>> {
        // SAFETY: the class is a Python class with slots and without a `__new__` of its own, like all dataclasses here;
        // this is what `object.__new__` does.
        let made = unsafe {
            let object = ffi::PyType_GenericAlloc(self.class.as_ptr().cast(), 0);
            Bound::from_owned_ptr_or_err(py, object)?
        };
        for (slot, value) in self.slots.iter().zip(values) {
            self.set(&made, slot, value)?;
        }
        Ok(made)
    }

    /// Write a slot of an object.
    pub fn put(&self, object: &Bound<'_, PyAny>, slot: usize, value: &Bound<'_, PyAny>) -> PyResult<()> {
        match self.slots.get(slot) {
            Some(slot) => self.set(object, slot, value),
            None => Err(PyTypeError::new_err("there is no such slot")),
        }
    }

    fn set(&self, object: &Bound<'_, PyAny>, slot: &Py<PyAny>, value: &Bound<'_, PyAny>) -> PyResult<()> {
        // SAFETY: all pointers are of live objects; the function checks the class of `object`, and takes a reference
        // of its own to `value`.
        let failed = unsafe { (self.set)(slot.as_ptr(), object.as_ptr(), value.as_ptr()) } != 0;
        if failed {
            Err(PyErr::fetch(object.py()))
        } else {
            Ok(())
        }
    }
}
