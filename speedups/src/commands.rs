//! Calls of scripts, packed as Redis reads them.

use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyInt, PyList, PyString};

/// Return the packed call of a script; `None` if Python must pack it.
#[pyfunction]
pub fn pack_call<'py>(
    sha: &str,
    keys: &Bound<'py, PyAny>,
    arguments: &Bound<'py, PyAny>,
) -> Option<Bound<'py, PyBytes>> {
    let keys = keys.cast_exact::<PyList>().ok()?;
    let arguments = arguments.cast_exact::<PyList>().ok()?;
    let mut packed = Vec::with_capacity(128 + 256 * keys.len());
    let parts = 3 + keys.len() + arguments.len();
    packed.extend_from_slice(format!("*{parts}\r\n").as_bytes());
    add(&mut packed, b"EVALSHA");
    add(&mut packed, sha.as_bytes());
    add(&mut packed, keys.len().to_string().as_bytes());
    for key in keys.iter() {
        add(&mut packed, key.cast_exact::<PyString>().ok()?.to_str().ok()?.as_bytes());
    }
    for argument in arguments.iter() {
        if let Ok(bytes) = argument.cast_exact::<PyBytes>() {
            add(&mut packed, bytes.as_bytes());
        } else {
            let number: i64 = argument.cast_exact::<PyInt>().ok()?.extract().ok()?;
            add(&mut packed, number.to_string().as_bytes());
        }
    }
    Some(PyBytes::new(keys.py(), &packed))
}

fn add(packed: &mut Vec<u8>, part: &[u8]) {
    packed.push(b'$');
    let mut digits = [0; 20];
    let mut at = digits.len();
    let mut rest = part.len();
    loop {
        at -= 1;
        digits[at] = b"0123456789"[rest % 10];
        rest /= 10;
        if rest == 0 {
            break;
        }
    }
    packed.extend_from_slice(&digits[at..]);
    packed.extend_from_slice(b"\r\n");
    packed.extend_from_slice(part);
    packed.extend_from_slice(b"\r\n");
}
