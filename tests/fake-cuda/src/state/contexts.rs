//! The contexts there are, and each thread's stack of them.

use std::cell::RefCell;
use std::collections::HashMap;

use crate::abi::*;

/// The contexts there are.
#[derive(Default)]
pub struct Contexts {
    pub live: HashMap<u64, Context>,
    /// For each device, the handle of its primary context and how often that is retained.
    pub primary: HashMap<i32, (u64, u32)>,
}

pub struct Context {
    pub device: i32,
    pub primary: bool,
}

thread_local! {
    /// The thread's stack of contexts; the last one is current.
    pub static STACK: RefCell<Vec<u64>> = const { RefCell::new(Vec::new()) };
}

impl Contexts {
    /// The calling thread's current context, if it is still alive.
    pub fn current(&self) -> Option<u64> {
        STACK.with_borrow(|stack| stack.last().copied()).filter(|handle| self.live.contains_key(handle))
    }
    /// The current context. Calls that need one have been refused where there is none.
    pub fn required(&self) -> Outcome<u64> {
        self.current().ok_or(ERROR_INVALID_CONTEXT)
    }
    pub fn device_of(&self, handle: u64) -> Option<i32> {
        self.live.get(&handle).map(|context| context.device)
    }
    pub fn leaks(&self) -> impl Iterator<Item = String> + '_ {
        let primary = self.primary.iter().filter(|(_, (_, count))| *count > 0);
        let primary =
            primary.map(|(device, (_, count))| format!("primary context of device {device}, retained {count} times"));
        let own = self.live.iter().filter(|(_, context)| !context.primary);
        primary.chain(own.map(|(handle, context)| format!("context {handle:#x} of device {}", context.device)))
    }
}
