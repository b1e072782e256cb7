//! Modules, functions and launches. Code is not run: a launch runs the host function that a test registered under the
//! kernel's name, which also says beforehand what the kernel will read and write.

use std::collections::HashMap;
use std::ffi::c_char;
use std::sync::Arc;

use crate::abi::*;
use crate::driver::{Guard, Need, enter};
use crate::launch::Launch;
use crate::state::modules::Function;
use crate::stream;
use crate::work::{Action, Work};

/// The entries of a PTX text with the sizes of their parameters; `None` if it is not PTX.
fn parse(text: &str) -> Option<HashMap<String, Vec<usize>>> {
    if !text.contains(".version") || !text.contains(".target") {
        return None;
    }
    let text: String =
        text.lines().map(|line| line.split("//").next().unwrap_or_default()).collect::<Vec<_>>().join("\n");
    let mut entries = HashMap::new();
    for entry in text.split(".entry").skip(1) {
        let end = entry.find(['(', '{', ';']).unwrap_or(entry.len());
        let name = entry[..end].trim().to_owned();
        let list = entry[end..].strip_prefix('(').and_then(|rest| rest.split(')').next()).unwrap_or_default();
        let sizes = list.split(',').filter(|parameter| parameter.contains(".param")).map(size_of_parameter);
        entries.insert(name, sizes.collect::<Option<Vec<usize>>>()?);
    }
    Some(entries)
}

/// `.param .u64 .ptr .global .align 16 name`, `.param .align 8 .b8 name[24]`.
fn size_of_parameter(parameter: &str) -> Option<usize> {
    let unit = parameter.split_whitespace().find_map(|word| match word {
        ".u8" | ".s8" | ".b8" => Some(1),
        ".u16" | ".s16" | ".b16" | ".f16" | ".bf16" => Some(2),
        ".u32" | ".s32" | ".b32" | ".f32" | ".f16x2" => Some(4),
        ".u64" | ".s64" | ".b64" | ".f64" => Some(8),
        ".b128" => Some(16),
        _ => None,
    })?;
    let count = match parameter.split_once('[') {
        Some((_, rest)) => rest.split(']').next()?.trim().parse().ok()?,
        None => 1,
    };
    Some(unit * count)
}

fn load(driver: &mut Guard, out: &Out<u64>, text: &str) -> Outcome {
    let entries = parse(text).ok_or(ERROR_INVALID_IMAGE)?;
    let handle = driver.new_handle();
    driver.modules.modules.insert(handle, entries);
    out.set(handle)
}

#[unsafe(no_mangle)]
pub extern "C" fn cuModuleLoadData(out: Out<u64>, image: In<c_char>) -> CuResult {
    enter("cuModuleLoadData", Need::Context, |driver| load(driver, &out, &image.text()?))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuModuleLoadDataEx(
    out: Out<u64>,
    image: In<c_char>,
    _count: u32,
    _options: usize,
    _values: usize,
) -> CuResult {
    enter("cuModuleLoadDataEx", Need::Context, |driver| load(driver, &out, &image.text()?))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuModuleLoad(out: Out<u64>, path: In<c_char>) -> CuResult {
    enter("cuModuleLoad", Need::Context, |driver| {
        let text = std::fs::read_to_string(path.text()?).map_err(|_| ERROR_FILE_NOT_FOUND)?;
        load(driver, &out, &text)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuModuleUnload(handle: u64) -> CuResult {
    enter("cuModuleUnload", Need::Context, |driver| {
        if driver.modules.modules.remove(&handle).is_none() {
            driver.judge.find("misuse", "cuModuleUnload was given a module that does not exist, or no longer");
            return Err(ERROR_INVALID_HANDLE);
        }
        driver.modules.functions.retain(|_, function| function.module != handle);
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuModuleGetFunction(out: Out<u64>, module: u64, name: In<c_char>) -> CuResult {
    enter("cuModuleGetFunction", Need::Context, |driver| {
        let name = name.text()?;
        let context = driver.contexts.required()?;
        let sizes =
            driver.modules.modules.get(&module).ok_or(ERROR_INVALID_HANDLE)?.get(&name).ok_or(ERROR_NOT_FOUND)?.clone();
        let handle = driver.new_handle();
        driver.modules.functions.insert(handle, Function { module, name, sizes, context });
        out.set(handle)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuFuncGetAttribute(out: Out<i32>, which: u32, handle: u64) -> CuResult {
    enter("cuFuncGetAttribute", Need::Context, |driver| {
        driver.modules.functions.get(&handle).ok_or(ERROR_INVALID_HANDLE)?;
        // Most threads in a block; the others are sizes of what is not used.
        out.set(if which == 0 { 1024 } else { 0 })
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuFuncSetAttribute(handle: u64, _which: u32, _value: i32) -> CuResult {
    enter("cuFuncSetAttribute", Need::Context, |driver| {
        driver.modules.functions.get(&handle).map(drop).ok_or(ERROR_INVALID_HANDLE)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuFuncSetCacheConfig(handle: u64, _config: u32) -> CuResult {
    enter("cuFuncSetCacheConfig", Need::Context, |driver| {
        driver.modules.functions.get(&handle).map(drop).ok_or(ERROR_INVALID_HANDLE)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuOccupancyMaxActiveBlocksPerMultiprocessor(
    out: Out<i32>,
    handle: u64,
    _block: i32,
    _shared: usize,
) -> CuResult {
    enter("cuOccupancyMaxActiveBlocksPerMultiprocessor", Need::Context, |driver| {
        driver.modules.functions.get(&handle).ok_or(ERROR_INVALID_HANDLE)?;
        out.set(2)
    })
}

fn launch(name: &'static str, function: u64, config: LaunchConfig, parameters: &In<usize>) -> CuResult {
    enter(name, Need::Context, |driver| {
        let stream = stream::find(driver, name, config.stream)?;
        let Some(found) = driver.modules.functions.get(&function) else {
            driver.judge.find(
                "misuse",
                &format!("{name} was given a function that does not exist, or whose module is unloaded"),
            );
            return Err(ERROR_INVALID_HANDLE);
        };
        if Some(found.context) != driver.contexts.current() {
            return Err(ERROR_INVALID_CONTEXT);
        }
        let threads = config.block.iter().map(|&n| u64::from(n)).product::<u64>();
        let empty = config.grid.iter().chain(&config.block).any(|&n| n == 0);
        if empty || threads > 1024 || config.block[2] > 64 || config.grid[1].max(config.grid[2]) > 65535 {
            return Err(ERROR_INVALID_VALUE);
        }
        let kernel_name = found.name.clone();
        let mut bytes = Vec::new();
        for (i, &size) in found.sizes.iter().enumerate() {
            bytes.push(In::<u8>::at_address(parameters.at(i)?).list(size)?);
        }
        let Some(&kernel) = driver.modules.kernels.get(&kernel_name) else {
            driver.judge.find(
                "misuse",
                &format!("kernel {kernel_name} was launched, but no host function is registered for it"),
            );
            return Err(ERROR_LAUNCH_FAILED);
        };
        let LaunchConfig { grid, block, shared, .. } = config;
        let launch = Launch::declared(grid, block, shared, bytes, kernel);
        let reach = launch.reach().to_vec();
        stream::submit(
            driver,
            stream,
            Work::new(&format!("kernel {kernel_name}"), reach, Action::Launch(Arc::new(launch))),
        )
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuLaunchKernel(
    function: u64,
    grid_x: u32,
    grid_y: u32,
    grid_z: u32,
    block_x: u32,
    block_y: u32,
    block_z: u32,
    shared: u32,
    stream: u64,
    parameters: In<usize>,
    _extra: usize,
) -> CuResult {
    let config = LaunchConfig::plain([grid_x, grid_y, grid_z], [block_x, block_y, block_z], shared, stream);
    launch("cuLaunchKernel", function, config, &parameters)
}

#[unsafe(no_mangle)]
pub extern "C" fn cuLaunchCooperativeKernel(
    function: u64,
    grid_x: u32,
    grid_y: u32,
    grid_z: u32,
    block_x: u32,
    block_y: u32,
    block_z: u32,
    shared: u32,
    stream: u64,
    parameters: In<usize>,
) -> CuResult {
    let config = LaunchConfig::plain([grid_x, grid_y, grid_z], [block_x, block_y, block_z], shared, stream);
    launch("cuLaunchCooperativeKernel", function, config, &parameters)
}

#[unsafe(no_mangle)]
pub extern "C" fn cuLaunchKernelEx(
    config: In<LaunchConfig>,
    function: u64,
    parameters: In<usize>,
    _extra: usize,
) -> CuResult {
    match config.get() {
        Ok(config) => launch("cuLaunchKernelEx", function, config, &parameters),
        Err(code) => code,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_and_parameters_of_ptx() {
        let text = "//\n.version 9.0\n.target sm_90\n\
            .visible .entry plain()\n{\n\tret;\n}\n\
            .func helper(.param .b32 x) { ret; }\n\
            .visible .entry mixed( // .entry in a comment\n\
            \t.param .u64 .ptr .global .align 16 mixed_param_0,\n\
            \t.param .f32 mixed_param_1,\n\
            \t.param .align 8 .b8 mixed_param_2[24],\n\
            \t.param .u16 mixed_param_3\n)\n.maxntid 256, 1, 1\n{\n\tret;\n}\n";
        let entries = parse(text).expect("it is PTX");
        assert_eq!(entries.len(), 2);
        assert_eq!(entries["plain"], Vec::<usize>::new());
        assert_eq!(entries["mixed"], [8, 4, 24, 2]);
        assert!(parse("\x7fELF").is_none());
    }
}
