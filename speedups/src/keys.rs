//! Keys and fingerprints of events, as `integr8s_idem.keys` makes them.

use pyo3::exceptions::PyValueError;
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyBytes, PyDict, PyInt, PyString, PyType};
use sha2::{Digest, Sha256};

const FINGERPRINT_BYTES: usize = 16;
/// The largest integer of I-JSON; others are written differently.
const SAFE_INTEGER: i64 = (1 << 53) - 1;

/// Makes the keys of the events of one class for one handler.
///
/// The fields of the class are plain, and sorted by their names: their JSON is canonical as they are written.
#[pyclass(frozen)]
pub struct KeyMaker {
    key: Py<PyType>,
    keyed_work: Py<PyType>,
    prefix: String,
    label: String,
    longest_label: usize,
    safe: [bool; 256],
    field_set: Vec<u8>,
    id: Py<PyString>,
    fields: Vec<(Py<PyString>, Vec<u8>)>,
}

#[pymethods]
impl KeyMaker {
    /// `prefix` precedes the id in a key, and `label` in its name; both are ASCII. `safe`: the characters of an id
    /// that are not escaped. `field_set`: the beginning of a fingerprint, which names the set of its fields. `names`: of the
    /// fields that are part of the fingerprint, in canonical order.
    #[new]
    #[pyo3(signature = (key, keyed_work, *, prefix, label, longest_label, safe, field_set, names))]
    #[allow(clippy::too_many_arguments)]
    fn new(
        py: Python<'_>,
        key: Py<PyType>,
        keyed_work: Py<PyType>,
        prefix: String,
        label: String,
        longest_label: usize,
        safe: &str,
        field_set: Vec<u8>,
        names: Vec<String>,
    ) -> PyResult<Self> {
        if field_set.len() > FINGERPRINT_BYTES {
            return Err(PyValueError::new_err("the name of a set of fields is longer than a fingerprint"));
        }
        let mut safe_bytes = [false; 256];
        for byte in safe.bytes() {
            safe_bytes[usize::from(byte)] = byte.is_ascii();
        }
        let mut fields = Vec::with_capacity(names.len());
        for name in names {
            let mut start = vec![if fields.is_empty() { b'{' } else { b',' }];
            write_string(&mut start, &name);
            start.push(b':');
            fields.push((PyString::intern(py, &name).unbind(), start));
        }
        Ok(Self {
            key,
            keyed_work,
            prefix,
            label,
            longest_label,
            safe: safe_bytes,
            field_set,
            id: PyString::intern(py, "event_id").unbind(),
            fields,
        })
    }

    /// Return key and fingerprint of `event` in `generation`; `None` if Python must make them.
    fn make<'py>(
        &self,
        event: &Bound<'py, PyAny>,
        generation: &Bound<'py, PyAny>,
    ) -> PyResult<Option<Bound<'py, PyAny>>> {
        let py = event.py();
        // SAFETY: `event` is alive; the function returns a new reference, or NULL with an exception.
        let found = unsafe {
            let values = ffi::PyObject_GenericGetDict(event.as_ptr(), std::ptr::null_mut());
            Bound::from_owned_ptr_or_err(py, values)
        };
        let Some((id, json)) = found.ok().and_then(|found| self.read(found.cast_exact::<PyDict>().ok()?)) else {
            return Ok(None);
        };
        let text = PyString::new(py, &[self.prefix.as_str(), &id].concat());
        let name = PyString::new(py, &[self.label.as_str(), &id].concat());
        let key = self.key.bind(py).call1((text, name, generation))?;
        let mut fingerprint = [0; FINGERPRINT_BYTES];
        let (set, digest) = fingerprint.split_at_mut(self.field_set.len());
        set.copy_from_slice(&self.field_set);
        digest.copy_from_slice(&Sha256::digest(json)[..digest.len()]);
        let fingerprint = PyBytes::new(py, &fingerprint);
        self.keyed_work.bind(py).call1((key, fingerprint)).map(Some)
    }
}

impl KeyMaker {
    /// Return the id of an event, and the canonical JSON of its payload.
    fn read(&self, values: &Bound<'_, PyDict>) -> Option<(String, Vec<u8>)> {
        let py = values.py();
        let mut json = Vec::with_capacity(512);
        for (name, start) in &self.fields {
            json.extend_from_slice(start);
            write_value(&mut json, &values.get_item(name.bind(py)).ok()??)?;
        }
        json.push(b'}');
        let id = values.get_item(self.id.bind(py)).ok()??;
        let id = id.cast_exact::<PyString>().ok()?.to_str().ok()?;
        let is_plain =
            id.len() + self.label.len() <= self.longest_label && id.bytes().all(|byte| self.safe[usize::from(byte)]);
        is_plain.then(|| (id.to_owned(), json))
    }
}

fn write_value(json: &mut Vec<u8>, value: &Bound<'_, PyAny>) -> Option<()> {
    if let Ok(text) = value.cast_exact::<PyString>() {
        write_string(json, text.to_str().ok()?);
    } else if value.is_none() {
        json.extend_from_slice(b"null");
    } else if let Ok(truth) = value.cast_exact::<PyBool>() {
        json.extend_from_slice(if truth.is_true() { b"true" } else { b"false" });
    } else {
        let number: i64 = value.cast_exact::<PyInt>().ok()?.extract().ok()?;
        if !(-SAFE_INTEGER..=SAFE_INTEGER).contains(&number) {
            return None;
        }
        json.extend_from_slice(number.to_string().as_bytes());
    }
    Some(())
}

fn write_string(json: &mut Vec<u8>, text: &str) {
    json.push(b'"');
    let bytes = text.as_bytes();
    let mut from = 0;
    for (at, &byte) in bytes.iter().enumerate() {
        if byte >= 0x20 && byte != b'"' && byte != b'\\' {
            continue;
        }
        json.extend_from_slice(&bytes[from..at]);
        from = at + 1;
        let short = match byte {
            b'"' | b'\\' => byte,
            0x08 => b'b',
            0x09 => b't',
            0x0A => b'n',
            0x0C => b'f',
            0x0D => b'r',
            _ => {
                json.extend_from_slice(format!("\\u{byte:04x}").as_bytes());
                continue;
            }
        };
        json.extend_from_slice(&[b'\\', short]);
    }
    json.extend_from_slice(&bytes[from..]);
    json.push(b'"');
}
