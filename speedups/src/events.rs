//! Finds the class of an event.

use std::collections::HashMap;

use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::json::envelope;

/// The classes of events that a service knows, by type.
#[pyclass(frozen)]
pub struct EventClasses {
    known: HashMap<String, (Py<PyAny>, String)>,
}

#[pymethods]
impl EventClasses {
    /// `known`: type, class and major version of each event.
    #[new]
    fn new(known: Vec<(String, Py<PyAny>, String)>) -> Self {
        Self { known: known.into_iter().map(|(name, class, major)| (name, (class, major))).collect() }
    }

    /// Return the class of the event in `body`; `None` if Python must read it.
    fn find(&self, py: Python<'_>, body: &Bound<'_, PyAny>) -> Option<Py<PyAny>> {
        let body = body.cast_exact::<PyBytes>().ok()?.as_bytes();
        let envelope = envelope(body)?;
        let (class, major) = self.known.get(envelope.event_type)?;
        let version = envelope.version.unwrap_or("1.0");
        let is_supported = version.split('.').next() == Some(major);
        is_supported.then(|| class.clone_ref(py))
    }
}
