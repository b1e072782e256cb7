//! What carries operations out: the queue they wait in, the loops that give them to the kernel, and reads that callers
//! carry out themselves.

pub(crate) mod operation;
pub(crate) mod own_read;
pub(crate) mod own_ring;
pub(crate) mod queue;
pub(crate) mod shared;
pub(crate) mod threads;
pub(crate) mod uring;
