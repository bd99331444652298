//! Native code that integr8s-idem uses if it is installed.
//!
//! Each function handles the common case, and otherwise returns `None` or calls Python: errors, and the handling of
//! unusual values, exist once, in Python. `integr8s_idem._util.speedups` loads this module.

mod classes;
mod commands;
mod events;
mod json;
mod keys;
mod redis;

use pyo3::prelude::*;

/// Number of the interface between this module and integr8s-idem, which uses only the one that it knows.
const INTERFACE: u32 = 6;

#[pymodule]
fn integr8s_idem_speedups(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    module.add("INTERFACE", INTERFACE)?;
    module.add_class::<events::EventClasses>()?;
    module.add_function(wrap_pyfunction!(commands::pack_call, module)?)?;
    module.add_class::<keys::KeyMaker>()?;
    module.add_class::<redis::RedisCodec>()
}
