//! A product as a kernel of the emulated driver.

use std::ffi::{CStr, c_char, c_void};

use half::{bf16, f16};

use crate::abi::*;
use crate::descriptors::Layout;
use crate::rules::Shape;

const KERNEL: &CStr = c"fakecublaslt_matmul";

/// A matrix in columns, as often as there are batches.
#[repr(C)]
#[derive(Clone, Copy)]
struct Matrix {
    address: u64,
    kind: u64,
    rows: u64,
    cols: u64,
    /// Elements between columns, and between batches.
    ld: u64,
    stride: u64,
}

impl Matrix {
    fn new(layout: &Layout, address: u64) -> Self {
        let Layout { kind, rows, cols, ld, stride, .. } = *layout;
        Self { address, kind: u64::from(kind), rows, cols, ld: ld as u64, stride: stride as u64 }
    }

    fn bytes(&self) -> u64 {
        if self.kind == u64::from(R_32F) { 4 } else { 2 }
    }

    fn column(&self, batch: u64, column: u64) -> u64 {
        self.address + (batch * self.stride + column * self.ld) * self.bytes()
    }
}

/// The kernel's parameter.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Job {
    /// A, B, C and D.
    matrices: [Matrix; 4],
    /// Of A and of B.
    transposed: [u64; 2],
    m: u64,
    n: u64,
    k: u64,
    batches: u64,
    workspace: u64,
    workspace_bytes: u64,
    alpha: f32,
    beta: f32,
}

impl Job {
    pub fn new(
        shape: &Shape,
        addresses: [u64; 4],
        (alpha, beta): (f32, f32),
        (workspace, workspace_bytes): (u64, u64),
    ) -> Self {
        Self {
            matrices: [0, 1, 2, 3].map(|i| Matrix::new(&shape.layouts[i], addresses[i])),
            transposed: shape.desc.transposed.map(u64::from),
            m: shape.m,
            n: shape.n,
            k: shape.k,
            batches: shape.layouts[3].batch,
            workspace,
            workspace_bytes,
            alpha,
            beta,
        }
    }

    /// Calls `each(address, bytes, write)` for all that is read and written.
    fn ranges(&self, mut each: impl FnMut(u64, u64, bool)) {
        let [a, b, c, d] = &self.matrices;
        let used = [(a, false, true), (b, false, true), (c, false, self.beta != 0.0), (d, true, true)];
        for (matrix, write, _) in used.into_iter().filter(|(.., used)| *used) {
            // Batches may share a matrix.
            let batches = if matrix.stride == 0 { 1 } else { self.batches };
            for batch in 0..batches {
                if matrix.ld == matrix.rows {
                    each(matrix.column(batch, 0), matrix.rows * matrix.cols * matrix.bytes(), write);
                } else {
                    for column in 0..matrix.cols {
                        each(matrix.column(batch, column), matrix.rows * matrix.bytes(), write);
                    }
                }
            }
        }
        if self.workspace_bytes > 0 {
            each(self.workspace, self.workspace_bytes, true);
        }
    }

    /// A batch of A or B as `count` vectors of `k` numbers.
    fn vectors(&self, api: &Driver, which: usize, batch: u64, count: u64) -> Vec<f32> {
        let matrix = &self.matrices[which];
        // A's vectors are its rows, B's its columns; each the other way round if it is transposed.
        let by_column = (self.transposed[which] != 0) == (which == 0);
        let columns: Vec<usize> = (0..matrix.cols)
            .map(|c| api.pointer(matrix.column(batch, c), matrix.rows * matrix.bytes(), false))
            .collect();
        let element = |column: u64, row: u64| {
            let address = columns[column as usize] + (row * matrix.bytes()) as usize;
            // SAFETY: the driver gave the address for a column that was declared, and the row is within it.
            let bits = unsafe { (address as *const u16).read_unaligned() };
            if matrix.kind == u64::from(R_16F) { f16::from_bits(bits).to_f32() } else { bf16::from_bits(bits).to_f32() }
        };
        let mut all = Vec::with_capacity((count * self.k) as usize);
        for vector in 0..count {
            for i in 0..self.k {
                all.push(if by_column { element(vector, i) } else { element(i, vector) });
            }
        }
        all
    }

    fn run(&self, api: &Driver) {
        for batch in 0..self.batches {
            let (rows, vectors) = (self.vectors(api, 0, batch, self.m), self.vectors(api, 1, batch, self.n));
            for (column, vector) in vectors.chunks(self.k as usize).enumerate() {
                let to = api.pointer(self.matrices[3].column(batch, column as u64), 4 * self.m, true) as *mut f32;
                let from = match self.beta {
                    0.0 => to.cast_const(),
                    _ => api.pointer(self.matrices[2].column(batch, column as u64), 4 * self.m, false) as *const f32,
                };
                for (row, weights) in rows.chunks(self.k as usize).enumerate() {
                    let sum = weights.iter().zip(vector).fold(0f32, |sum, (w, x)| sum + w * x);
                    let before = match self.beta {
                        0.0 => 0.0,
                        // SAFETY: C's column was declared, and is as long as D's.
                        beta => beta * unsafe { from.add(row).read_unaligned() },
                    };
                    // SAFETY: D's column was declared, and has a number for each row.
                    unsafe { to.add(row).write_unaligned(self.alpha * sum + before) };
                }
            }
        }
        // What it holds afterwards is undefined, so it is not zero.
        if self.workspace_bytes > 0 {
            let workspace = api.pointer(self.workspace, self.workspace_bytes, true) as *mut u8;
            // SAFETY: the range was declared.
            unsafe { workspace.write_bytes(0xff, self.workspace_bytes as usize) };
        }
    }
}

/// A launch as the emulated driver shows it.
#[repr(C)]
pub struct Launch {
    grid: [u32; 3],
    block: [u32; 3],
    shared: u32,
    count: u32,
    parameters: *const *const u8,
    sizes: *const usize,
}

impl Launch {
    fn job(&self) -> Job {
        // SAFETY: the kernel has one parameter, whose size the driver read in its PTX: that of a job.
        unsafe { (*self.parameters).cast::<Job>().read_unaligned() }
    }
}

extern "C" fn declare(launch: &Launch, sink: *mut c_void, _: usize) {
    if let Ok(api) = Driver::of_process() {
        launch.job().ranges(|address, bytes, write| (api.declare)(sink, address, bytes, write));
    }
}

extern "C" fn run(launch: &Launch, _: usize) {
    if let Ok(api) = Driver::of_process() {
        launch.job().run(&api);
    }
}

macro_rules! driver {
    ($($name:ident = $symbol:literal: fn($($argument:ty),*) $(-> $result:ty)?;)*) => {
        /// What this library calls of the emulated driver.
        #[derive(Clone, Copy)]
        pub struct Driver { $($name: extern "C" fn($($argument),*) $(-> $result)?,)* }
        impl Driver {
            /// The process's; an error where it has not loaded the emulated one.
            pub fn of_process() -> Outcome<Self> {
                Ok(Self { $($name: {
                    let found = symbol($symbol)?;
                    // SAFETY: each type is the signature of the function of that name in tests/fake-cuda.
                    unsafe { std::mem::transmute::<*mut c_void, extern "C" fn($($argument),*) $(-> $result)?>(found) }
                },)* })
            }
        }
    };
}

driver! {
    register = c"fakecuda_register_kernel":
        fn(*const c_char, extern "C" fn(&Launch, *mut c_void, usize), extern "C" fn(&Launch, usize), usize) -> bool;
    declare = c"fakecuda_declare": fn(*mut c_void, u64, u64, bool);
    pointer_to = c"fakecuda_pointer": fn(u64, u64, bool) -> usize;
    load_module = c"cuModuleLoadData": fn(*mut u64, *const c_char) -> u32;
    unload_module = c"cuModuleUnload": fn(u64) -> u32;
    function = c"cuModuleGetFunction": fn(*mut u64, u64, *const c_char) -> u32;
    launch = c"cuLaunchKernel": fn(u64, u32, u32, u32, u32, u32, u32, u32, u64, *const *const c_void, usize) -> u32;
}

fn symbol(name: &CStr) -> Outcome<*mut c_void> {
    // SAFETY: the name is a C string; the driver is never unloaded.
    let found = unsafe { libc::dlsym(libc::RTLD_DEFAULT, name.as_ptr()) };
    if found.is_null() { Err(NOT_INITIALIZED) } else { Ok(found) }
}

impl Driver {
    fn pointer(&self, address: u64, bytes: u64, write: bool) -> usize {
        let found = (self.pointer_to)(address, bytes, write);
        if found == 0 {
            eprintln!("fake cuBLASLt: {bytes} bytes at {address:#x} were not declared");
            std::process::abort();
        }
        found
    }

    /// Makes the kernel known to the current context.
    pub fn load(self) -> Outcome<Module> {
        let text = format!(
            ".version 9.0\n.target sm_80\n.address_size 64\n\
             .visible .entry {}(.param .align 8 .b8 job[{}])\n{{\n\tret;\n}}\n\0",
            KERNEL.to_string_lossy(),
            size_of::<Job>()
        );
        let (mut module, mut function) = (0, 0);
        let known = (self.register)(KERNEL.as_ptr(), declare, run, 0)
            && (self.load_module)(&mut module, text.as_ptr().cast()) == 0
            && (self.function)(&mut function, module, KERNEL.as_ptr()) == 0;
        if known { Ok(Module { driver: self, module, function }) } else { Err(NOT_INITIALIZED) }
    }
}

/// The kernel, loaded.
#[derive(Clone, Copy)]
pub struct Module {
    driver: Driver,
    module: u64,
    function: u64,
}

impl Module {
    pub fn unload(&self) -> Outcome {
        if (self.driver.unload_module)(self.module) == 0 { Ok(()) } else { Err(EXECUTION_FAILED) }
    }

    pub fn launch(&self, job: Job, stream: u64) -> Outcome {
        let parameters = [(&raw const job).cast::<c_void>()];
        match (self.driver.launch)(self.function, 1, 1, 1, 1, 1, 1, 0, stream, parameters.as_ptr(), 0) {
            0 => Ok(()),
            _ => Err(EXECUTION_FAILED),
        }
    }
}
