//! outcore for C. `include/outcore.h` is made of this crate, and is what a caller reads.
//!
//! - A handle of C is no address. It is a key of one table (`handles`) of all living objects, so that a handle that was
//!   freed, or is of another kind, is an error and never an access to memory that is not there.
//! - All else that comes from C is read, and all that goes there is written, in `raw`: no other memory is the caller's
//!   to promise.
//! - Every function runs in `call::call` or `call::quiet`, which let no panic out.

#![allow(non_camel_case_types, reason = "the types have the names that they have in C")]
#![cfg_attr(test, allow(clippy::expect_used, reason = "a test that cannot go on fails"))]
#![allow(clippy::missing_safety_doc, reason = "the header says once what every function asks of its caller")]

mod call;
mod handles;
mod mapped;
mod model;
mod options;
mod pins;
mod raw;
mod runtime;
mod tensor;
