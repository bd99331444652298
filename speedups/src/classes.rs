//! Classes of Python whose objects native code reads and makes.

use pyo3::prelude::*;
use pyo3::types::{PyDict, PyString, PyType};

/// A class, and the names of some of its fields, by index.
pub struct Class {
    class: Py<PyType>,
    names: Vec<Py<PyString>>,
}

impl Class {
    pub fn new(class: &Bound<'_, PyType>, names: &[&str]) -> Self {
        let names = names.iter().map(|name| PyString::intern(class.py(), name).unbind()).collect();
        Self { class: class.clone().unbind(), names }
    }

    /// Return the value of a field; `None` if `object` is not exactly of this class.
    pub fn get<'py>(&self, object: &Bound<'py, PyAny>, field: usize) -> Option<Bound<'py, PyAny>> {
        if object.get_type_ptr().cast() != self.class.as_ptr() {
            return None;
        }
        object.getattr(self.names.get(field)?).ok()
    }

    /// Make an object with `values` for the first fields, in order; the others keep their defaults.
    pub fn make<'py>(&self, py: Python<'py>, values: &[&Bound<'py, PyAny>]) -> PyResult<Bound<'py, PyAny>> {
        let arguments = PyDict::new(py);
        for (name, value) in self.names.iter().zip(values) {
            arguments.set_item(name, value)?;
        }
        self.class.bind(py).call((), Some(&arguments))
    }
}
