//! The modules that are loaded, their functions, and what kernels of which name do.

use std::collections::HashMap;

use crate::launch::{Declare, Kernel, RunKernel};

#[derive(Default)]
pub struct Modules {
    pub modules: HashMap<u64, HashMap<String, Vec<usize>>>,
    pub functions: HashMap<u64, Function>,
    pub kernels: HashMap<String, Kernel>,
}

pub struct Function {
    pub module: u64,
    pub name: String,
    /// The sizes of the parameters.
    pub sizes: Vec<usize>,
    pub context: u64,
}

impl Modules {
    pub fn register(&mut self, name: String, declare: Declare, run: RunKernel, argument: usize) {
        self.kernels.insert(name, Kernel { declare, run, argument });
    }
    pub fn leaks(&self) -> Vec<String> {
        self.modules
            .values()
            .map(|module| {
                let mut names: Vec<&str> = module.keys().map(String::as_str).collect();
                names.sort_unstable();
                format!("module with {}", names.join(", "))
            })
            .collect()
    }
}
