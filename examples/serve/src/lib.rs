//! The server's parts; the program that is made of them is [`program`].
#![warn(missing_docs)]

pub mod args;
pub mod call;
pub mod calls;
mod capture;
pub mod channels;
pub mod engine;
pub mod error;
pub mod grammar;
pub mod http;
pub mod metrics;
pub mod open;
pub mod places;
pub mod program;
pub mod request;
pub mod sampling;
pub mod slack;
pub mod tenants;
pub mod text;
