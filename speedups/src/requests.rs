//! Requests for reservations, as `StoreClient.request` makes them.

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyBytes, PyList, PyString, PyType};

use crate::slots::Slots;

const TOKEN_BYTES: usize = 16;

/// Makes the requests of one store client, whose keys are not hashed.
#[pyclass(frozen)]
pub struct RequestMaker {
    work: Slots,
    key: Slots,
    request: Slots,
    alone: Py<PyAny>,
    root: String,
    longest_plain: usize,
    lease: Py<PyAny>,
    owner: Py<PyAny>,
    retention_of: Py<PyAny>,
}

#[pymethods]
impl RequestMaker {
    /// `alone`: `Isolation.ALONE`. `root` precedes the text of each key; a longer key than `longest_plain` is hashed.
    /// `retention_of` returns how long the record of work with a given time to live is kept.
    #[new]
    #[pyo3(signature = (work, key, request, *, alone, root, longest_plain, lease, owner, retention_of))]
    #[allow(clippy::too_many_arguments)]
    fn new(
        work: &Bound<'_, PyType>,
        key: &Bound<'_, PyType>,
        request: &Bound<'_, PyType>,
        alone: Py<PyAny>,
        root: String,
        longest_plain: usize,
        lease: Py<PyAny>,
        owner: Py<PyAny>,
        retention_of: Py<PyAny>,
    ) -> PyResult<Self> {
        Ok(Self {
            work: Slots::new(work, &["key", "fingerprint", "ttl", "token", "isolation"])?,
            key: Slots::new(key, &["text", "generation"])?,
            request: Slots::new(
                request,
                &["key", "token", "lease", "retention", "fingerprint", "owner", "trace", "alone"],
            )?,
            alone,
            root,
            longest_plain,
            lease,
            owner,
            retention_of,
        })
    }

    /// Return a request for each of `works`, which gets the next of `tokens` if it has none; `slowly` makes the request
    /// for work that Python must look at.
    fn make<'py>(
        &self,
        works: &Bound<'py, PyList>,
        tokens: &Bound<'py, PyBytes>,
        slowly: &Bound<'py, PyAny>,
    ) -> PyResult<Vec<Bound<'py, PyAny>>> {
        let mut tokens = tokens.as_bytes().chunks_exact(TOKEN_BYTES);
        let mut ttl = None;
        let mut retention = works.py().None().into_bound(works.py());
        let mut requests = Vec::with_capacity(works.len());
        for work in works.iter() {
            let Some(parts) = self.read(&work) else {
                requests.push(slowly.call1((work,))?);
                continue;
            };
            if !ttl.as_ref().is_some_and(|known| parts.ttl.is(known)) {
                retention = self.retention_of.bind(works.py()).call1((&parts.ttl,))?;
                ttl = Some(parts.ttl.clone());
            }
            let token = self.token_of(&work, &parts.token, &mut tokens)?;
            requests.push(self.request_of(&parts, &token, &retention)?);
        }
        Ok(requests)
    }
}

/// What a request needs of its work.
struct Parts<'py> {
    full_key: Bound<'py, PyString>,
    fingerprint: Bound<'py, PyAny>,
    ttl: Bound<'py, PyAny>,
    token: Bound<'py, PyBytes>,
    is_alone: bool,
}

impl RequestMaker {
    fn read<'py>(&self, work: &Bound<'py, PyAny>) -> Option<Parts<'py>> {
        let get = |slot| self.work.get(work, slot);
        let key = get(0)?;
        if !self.work.describes(work) || !self.key.describes(&key) {
            return None;
        }
        let (text, generation) = (self.key.get(&key, 0)?, self.key.get(&key, 1)?);
        let text = text.cast_exact::<PyString>().ok()?.to_str().ok()?;
        let is_plain = text.is_ascii() && self.root.len() + text.len() <= self.longest_plain;
        if !is_plain || generation.is_truthy().ok()? {
            return None;
        }
        Some(Parts {
            full_key: PyString::new(work.py(), &[self.root.as_str(), text].concat()),
            fingerprint: get(1)?,
            ttl: get(2)?,
            token: get(3)?.cast_into_exact::<PyBytes>().ok()?,
            is_alone: get(4)?.is(&self.alone),
        })
    }

    /// Return the token that the work keeps, or give it the next one.
    fn token_of<'py, 'a>(
        &self,
        work: &Bound<'py, PyAny>,
        kept: &Bound<'py, PyBytes>,
        tokens: &mut impl Iterator<Item = &'a [u8]>,
    ) -> PyResult<Bound<'py, PyBytes>> {
        if !kept.as_bytes().is_empty() {
            return Ok(kept.clone());
        }
        let Some(token) = tokens.next() else {
            return Err(PyValueError::new_err("there are fewer tokens than works"));
        };
        let token = PyBytes::new(work.py(), token);
        self.work.put(work, 3, token.as_any())?;
        Ok(token)
    }

    fn request_of<'py>(
        &self,
        parts: &Parts<'py>,
        token: &Bound<'py, PyBytes>,
        retention: &Bound<'py, PyAny>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let py = token.py();
        let (lease, owner) = (self.lease.bind(py), self.owner.bind(py));
        let (no_trace, alone) = (py.None().into_bound(py), PyBool::new(py, parts.is_alone).to_owned());
        let key = parts.full_key.as_any();
        self.request
            .make(py, &[key, token.as_any(), lease, retention, &parts.fingerprint, owner, &no_trace, alone.as_any()])
    }
}
