//! Arguments of the scripts in Redis, and verdicts on completed work, as `integr8s_idem.stores.redis.codec` makes them.

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyBytes, PyInt, PyList, PyString, PyTuple, PyType};

use crate::classes::Class;

const TOKEN_BYTES: usize = 16;
const FINGERPRINT_BYTES: usize = 16;
const TRACE_ID_BYTES: usize = 16;
const TRACE_BYTES: usize = 24;
const CHECK_BYTES: usize = 4;
const SETTLED_BYTES: usize = 20;
const SETTLED_FORMAT: u8 = 3;
const COMPLETED: u8 = 2 << 5;
const ALL_FLAGS: u8 = 31;
const HAS_FINGERPRINT: u8 = 1;
const HAS_TRACE: u8 = 2;
const HAS_RESULT: u8 = 4;
const IS_JSON: u8 = 8;
const IS_DROPPED: u8 = 16;
const JSON: &str = "application/json";
const NULL: &[u8] = b"null";

/// Encodes requests and completions, and makes the verdicts on completed work.
#[pyclass(frozen)]
pub struct RedisCodec {
    request: Class,
    reserved: Class,
    completion: Class,
    completed: Class,
    result: Class,
    trace: Class,
    encode_times: Py<PyAny>,
    encode_life: Py<PyAny>,
    moment: Py<PyAny>,
}

#[pymethods]
impl RedisCodec {
    /// The classes, and the functions that encode lease and retention, encode the life of a record, and convert
    /// milliseconds to a time.
    #[new]
    #[pyo3(signature = (*, request, reserved, completion, completed, result, trace, encode_times, encode_life, moment))]
    #[allow(clippy::too_many_arguments)]
    fn new(
        request: &Bound<'_, PyType>,
        reserved: &Bound<'_, PyType>,
        completion: &Bound<'_, PyType>,
        completed: &Bound<'_, PyType>,
        result: &Bound<'_, PyType>,
        trace: &Bound<'_, PyType>,
        encode_times: Py<PyAny>,
        encode_life: Py<PyAny>,
        moment: Py<PyAny>,
    ) -> PyResult<Self> {
        Ok(Self {
            request: Class::new(
                request,
                &["key", "token", "lease", "retention", "fingerprint", "owner", "trace", "alone"],
            ),
            reserved: Class::new(reserved, &["key", "token", "attempt", "fence", "lease"]),
            completion: Class::new(completion, &["reservation", "ttl", "result", "result_dropped"]),
            completed: Class::new(completed, &["key", "attempt", "completed_at", "result", "result_dropped", "trace"]),
            result: Class::new(result, &["body", "content_type"]),
            trace: Class::new(trace, &["trace_id", "span_id"]),
            encode_times,
            encode_life,
            moment,
        })
    }

    /// Return the argument of `reserve.lua` for each request; `slowly` encodes a request that Python must encode.
    fn encode_requests<'py>(
        &self,
        requests: &Bound<'py, PyList>,
        slowly: &Bound<'py, PyAny>,
    ) -> PyResult<Vec<Bound<'py, PyAny>>> {
        let mut times = Cached::new(self.encode_times.bind(requests.py()).clone());
        let mut encoded = Vec::with_capacity(requests.len());
        for request in requests.iter() {
            encoded.push(match self.encode_request(&request, &mut times) {
                Some(bytes) => PyBytes::new(requests.py(), &bytes).into_any(),
                None => slowly.call1((request,))?,
            });
        }
        Ok(encoded)
    }

    /// Return the verdict on a request whose answer is the record of completed work; `None` if Python must make it.
    fn completed<'py>(&self, request: &Bound<'py, PyAny>, answer: &Bound<'py, PyAny>) -> Option<Bound<'py, PyAny>> {
        let py = request.py();
        let record = Settled::read(answer.cast_exact::<PyBytes>().ok()?.as_bytes())?;
        let (key, offered) = (self.request.get(request, 0)?, self.request.get(request, 4)?);
        if let (Some(stored), false) = (record.fingerprint, offered.is_none()) {
            if offered.cast_exact::<PyBytes>().ok()?.as_bytes() != stored {
                return None;
            }
        }
        let none = py.None().into_bound(py);
        let trace = match record.trace {
            Some(trace) => {
                let (trace_id, span_id) = trace.split_at(TRACE_ID_BYTES);
                self.trace.make(py, &[&PyBytes::new(py, trace_id), &PyBytes::new(py, span_id)]).ok()?
            }
            None => none.clone(),
        };
        let result = match record.result {
            Some(body) => self.result.make(py, &[&PyBytes::new(py, body), intern!(py, JSON)]).ok()?,
            None => none,
        };
        let attempt = record.attempt.into_pyobject(py).ok()?;
        let completed_at = self.moment.bind(py).call1((record.time_ms,)).ok()?;
        let dropped = PyBool::new(py, record.is_dropped);
        self.completed.make(py, &[&key, &attempt, &completed_at, &result, &dropped, &trace]).ok()
    }

    /// Return the argument of `settle.lua` for each completion; `slowly` encodes one that Python must encode.
    fn encode_completions<'py>(
        &self,
        completions: &Bound<'py, PyList>,
        slowly: &Bound<'py, PyAny>,
    ) -> PyResult<Vec<Bound<'py, PyAny>>> {
        let mut life = Cached::new(self.encode_life.bind(completions.py()).clone());
        let mut encoded = Vec::with_capacity(completions.len());
        for completion in completions.iter() {
            encoded.push(match self.encode_completion(&completion, &mut life) {
                Some(bytes) => PyBytes::new(completions.py(), &bytes).into_any(),
                None => slowly.call1((completion,))?,
            });
        }
        Ok(encoded)
    }
}

impl RedisCodec {
    fn encode_request<'py>(&self, request: &Bound<'py, PyAny>, times: &mut Cached<'py>) -> Option<Vec<u8>> {
        let get = |slot| self.request.get(request, slot);
        let (trace, alone) = (get(6)?, get(7)?);
        if !trace.is_none() || alone.is_truthy().ok()? {
            return None;
        }
        let (token, fingerprint, owner) = (get(1)?, get(4)?, get(5)?);
        let token = bytes_of(&token, TOKEN_BYTES)?;
        let (flags, fingerprint) = match fingerprint.is_none() {
            true => (0, &[][..]),
            false => (HAS_FINGERPRINT, bytes_of(&fingerprint, FINGERPRINT_BYTES)?),
        };
        let owner = owner.cast_exact::<PyString>().ok()?.to_str().ok()?.as_bytes();
        let mut check = crc32fast::Hasher::new();
        check.update(token);
        check.update(owner);
        let mut encoded = Vec::with_capacity(64 + owner.len());
        encoded.extend_from_slice(times.bytes_for(&[get(2)?, get(3)?])?);
        encoded.push(flags);
        encoded.extend_from_slice(fingerprint);
        encoded.extend_from_slice(&crc32fast::hash(fingerprint).to_be_bytes());
        encoded.extend_from_slice(&check.finalize().to_be_bytes());
        encoded.extend_from_slice(token);
        encoded.extend_from_slice(owner);
        Some(encoded)
    }

    fn encode_completion<'py>(&self, completion: &Bound<'py, PyAny>, life: &mut Cached<'py>) -> Option<Vec<u8>> {
        let get = |slot| self.completion.get(completion, slot);
        let (reservation, result, dropped) = (get(0)?, get(2)?, get(3)?);
        let (token, fence) = (self.reserved.get(&reservation, 1)?, self.reserved.get(&reservation, 3)?);
        let token = bytes_of(&token, TOKEN_BYTES)?;
        let fence: u64 = fence.cast_exact::<PyInt>().ok()?.extract().ok()?;
        let [0, fence @ ..] = fence.to_be_bytes() else {
            return None;
        };
        let mut encoded = Vec::with_capacity(64);
        encoded.extend_from_slice(life.bytes_for(&[get(1)?])?);
        encoded.extend_from_slice(&fence);
        encoded.extend_from_slice(token);
        let flags = if dropped.is_truthy().ok()? { IS_DROPPED } else { 0 };
        self.encode_result(&mut encoded, &result, flags)?;
        Some(encoded)
    }

    fn encode_result(&self, encoded: &mut Vec<u8>, result: &Bound<'_, PyAny>, flags: u8) -> Option<()> {
        if result.is_none() {
            encoded.push(flags);
            return Some(());
        }
        let (body, content_type) = (self.result.get(result, 0)?, self.result.get(result, 1)?);
        if content_type.cast_exact::<PyString>().ok()?.to_str().ok()? != JSON {
            return None;
        }
        let body = body.cast_exact::<PyBytes>().ok()?.as_bytes();
        if body == NULL {
            encoded.push(flags | IS_JSON);
        } else {
            encoded.push(flags | HAS_RESULT | IS_JSON);
            encoded.extend_from_slice(&crc32fast::hash(body).to_be_bytes());
            encoded.extend_from_slice(body);
        }
        Some(())
    }
}

/// The parts of a settled record of format 3, which must be completed, with a result in JSON, if it has one.
struct Settled<'a> {
    attempt: u16,
    time_ms: u64,
    fingerprint: Option<&'a [u8]>,
    trace: Option<&'a [u8]>,
    result: Option<&'a [u8]>,
    is_dropped: bool,
}

impl<'a> Settled<'a> {
    /// Read a record; `None` if it is damaged, or another one.
    fn read(raw: &'a [u8]) -> Option<Self> {
        let (head, rest) = raw.split_at_checked(SETTLED_BYTES)?;
        let (words, check) = head.split_at(SETTLED_BYTES - CHECK_BYTES);
        let [SETTLED_FORMAT, status_and_flags, ..] = *words else {
            return None;
        };
        let flags = status_and_flags & ALL_FLAGS;
        if status_and_flags & !ALL_FLAGS != COMPLETED {
            return None;
        }
        let mut at = 0;
        let mut part = |flag, length| {
            let from = at;
            at += if flags & flag != 0 { length } else { 0 };
            from..at
        };
        let (fingerprint, trace) = (part(HAS_FINGERPRINT, FINGERPRINT_BYTES), part(HAS_TRACE, TRACE_BYTES));
        let (extras, result) = rest.split_at_checked(at)?;
        let sum = words
            .chunks_exact(CHECK_BYTES)
            .try_fold(crc32fast::hash(extras), |sum, word| Some(sum ^ u32::from_be_bytes(word.try_into().ok()?)))?;
        let attempt = number(&words[2..4]);
        if sum.to_be_bytes() != check || attempt == 0 {
            return None;
        }
        Some(Self {
            attempt: u16::try_from(attempt).ok()?,
            time_ms: number(&words[4..11]) / 1000 + number(&words[11..16]),
            fingerprint: extras.get(fingerprint).filter(|bytes| !bytes.is_empty()),
            trace: extras.get(trace).filter(|bytes| !bytes.is_empty()),
            result: result_of(flags, result)?,
            is_dropped: flags & IS_DROPPED != 0,
        })
    }
}

/// Return the result in the end of a record; `None` if it is damaged, or not JSON.
fn result_of(flags: u8, end: &[u8]) -> Option<Option<&[u8]>> {
    match (flags & HAS_RESULT != 0, flags & IS_JSON != 0) {
        (true, true) => {
            let (check, body) = end.split_at_checked(CHECK_BYTES)?;
            (crc32fast::hash(body).to_be_bytes() == check).then_some(Some(body))
        }
        (true, false) => None,
        (false, is_null) => end.is_empty().then_some(is_null.then_some(NULL)),
    }
}

/// Return a number of at most eight bytes.
fn number(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0, |sum, byte| sum << 8 | u64::from(*byte))
}

fn bytes_of<'a>(value: &'a Bound<'_, PyAny>, length: usize) -> Option<&'a [u8]> {
    let bytes = value.cast_exact::<PyBytes>().ok()?.as_bytes();
    (bytes.len() == length).then_some(bytes)
}

/// What a function returned for its last arguments: most of a batch has the same durations.
struct Cached<'py> {
    function: Bound<'py, PyAny>,
    arguments: Vec<Bound<'py, PyAny>>,
    found: Vec<u8>,
}

impl<'py> Cached<'py> {
    fn new(function: Bound<'py, PyAny>) -> Self {
        Self { function, arguments: Vec::new(), found: Vec::new() }
    }

    /// Return the bytes for `arguments`; `None` if the function raises an error.
    fn bytes_for(&mut self, arguments: &[Bound<'py, PyAny>]) -> Option<&[u8]> {
        let is_known = self.arguments.len() == arguments.len()
            && self.arguments.iter().zip(arguments).all(|(one, other)| one.is(other));
        if !is_known {
            let py = self.function.py();
            let found = self.function.call1(PyTuple::new(py, arguments).ok()?).ok()?;
            self.found = found.cast_exact::<PyBytes>().ok()?.as_bytes().to_vec();
            self.arguments = arguments.to_vec();
        }
        Some(&self.found)
    }
}
