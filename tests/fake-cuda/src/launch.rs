//! A launch: the kernel's parameters, the host function in its place, and what that has declared.

use std::cell::RefCell;
use std::fs::File;
use std::path::PathBuf;

use crate::abi::Outcome;
use crate::clock::Clock;
use crate::judge::Op;
use crate::reach::Reach;

/// What a test registers: `declare` is called at the launch, `run` on the stream's thread.
#[derive(Clone, Copy)]
pub struct Kernel {
    pub declare: Declare,
    pub run: RunKernel,
    pub argument: usize,
}

pub type Declare = extern "C" fn(launch: *const RawLaunch, sink: *mut libc::c_void, argument: usize);
pub type RunKernel = extern "C" fn(launch: *const RawLaunch, argument: usize);

/// A launch as the registered functions see it.
#[repr(C)]
pub struct RawLaunch {
    pub grid: [u32; 3],
    pub block: [u32; 3],
    pub shared: u32,
    pub count: u32,
    /// `count` pointers to the parameters' bytes.
    pub parameters: *const *const u8,
    /// `count` sizes.
    pub sizes: *const usize,
}

/// A launch with its own copy of the parameters.
pub struct Launch {
    grid: [u32; 3],
    block: [u32; 3],
    shared: u32,
    parameters: Vec<Vec<u8>>,
    kernel: Kernel,
    reach: Vec<Reach>,
}

thread_local! {
    /// What the kernel that this thread runs has declared.
    static RUNNING: RefCell<Vec<Reach>> = const { RefCell::new(Vec::new()) };
    /// The launch that this thread runs.
    static LATE: RefCell<Option<Late>> = const { RefCell::new(None) };
}

/// A launch as the judge knows it, for what its kernel finds out only while it runs.
pub struct Late {
    pub op: Op,
    pub clock: Clock,
    /// What had been submitted to each timeline when the launch was. Operations behind that are ordered, if at all,
    /// behind the launch.
    pub submitted: Vec<u64>,
}

/// Gives `look` the launch that this thread runs; `None` outside of kernels.
pub fn running_launch<T>(look: impl FnOnce(&Late) -> T) -> Option<T> {
    LATE.with_borrow(|late| late.as_ref().map(look))
}

/// Looks at what the running kernel has declared.
pub fn running_reach<T>(look: impl FnOnce(&[Reach]) -> T) -> T {
    RUNNING.with_borrow(|reach| look(reach))
}

impl Launch {
    fn with_raw<T>(&self, f: impl FnOnce(*const RawLaunch) -> T) -> T {
        let pointers: Vec<*const u8> = self.parameters.iter().map(|bytes| bytes.as_ptr()).collect();
        let sizes: Vec<usize> = self.parameters.iter().map(Vec::len).collect();
        let raw = RawLaunch {
            grid: self.grid,
            block: self.block,
            shared: self.shared,
            count: pointers.len() as u32,
            parameters: pointers.as_ptr(),
            sizes: sizes.as_ptr(),
        };
        f(&raw)
    }
    /// A launch whose kernel has said what it will touch.
    pub fn declared(grid: [u32; 3], block: [u32; 3], shared: u32, parameters: Vec<Vec<u8>>, kernel: Kernel) -> Self {
        let mut launch = Self { grid, block, shared, parameters, kernel, reach: Vec::new() };
        let mut reach: Vec<Reach> = Vec::new();
        launch.with_raw(|raw| (kernel.declare)(raw, (&raw mut reach).cast(), kernel.argument));
        launch.reach = reach;
        launch
    }
    /// What the kernel has declared.
    pub fn reach(&self) -> &[Reach] {
        &self.reach
    }
    /// Runs the kernel; the file at `gate` is read to its end first.
    pub fn run(&self, late: Late, gate: Option<PathBuf>) -> Outcome {
        // A pipe that cannot be opened holds nothing up.
        if let Some(mut pipe) = gate.and_then(|path| File::open(path).ok()) {
            let _ = std::io::copy(&mut pipe, &mut std::io::sink());
        }
        RUNNING.set(self.reach.clone());
        LATE.set(Some(late));
        self.with_raw(|raw| (self.kernel.run)(raw, self.kernel.argument));
        LATE.set(None);
        Ok(())
    }
}
