//! cuBLASLt for tests, on the CPU. See README.md for what it refuses and how it computes.
//!
//! `descriptors` has what programs say of a product, `rules` says which products exist and which algorithm they get,
//! `product` runs one on a stream of the emulated driver, and `objects` holds what programs have made. This file has
//! the functions that programs and tests call.

mod abi;
mod descriptors;
mod objects;
mod product;
mod rules;

use std::ffi::{c_int, c_void};

use abi::*;
use descriptors::{Desc, Layout, Preference};
use objects::{Object, lock};
use product::{Driver, Job};

fn status(outcome: Outcome) -> Status {
    outcome.err().unwrap_or(SUCCESS)
}

#[unsafe(no_mangle)]
pub extern "C" fn cublasLtCreate(out: Out<u64>) -> Status {
    status((|| {
        if lock().refuses(1) {
            return Err(NOT_INITIALIZED);
        }
        let driver = Driver::of_process()?;
        let module = driver.load()?;
        out.set(lock().add(Object::Handle(module)))
    })())
}

#[unsafe(no_mangle)]
pub extern "C" fn cublasLtDestroy(handle: u64) -> Status {
    status((|| {
        let Some(Object::Handle(module)) = lock().remove(handle, |object| matches!(object, Object::Handle(_))) else {
            return Err(NOT_INITIALIZED);
        };
        module.unload()
    })())
}

#[unsafe(no_mangle)]
pub extern "C" fn cublasLtMatmulDescCreate(out: Out<u64>, compute: u32, scale: u32) -> Status {
    let desc = Desc { compute, scale, transposed: [false; 2] };
    status(out.set(lock().add(Object::Desc(desc))))
}

#[unsafe(no_mangle)]
pub extern "C" fn cublasLtMatrixLayoutCreate(out: Out<u64>, kind: u32, rows: u64, cols: u64, ld: i64) -> Status {
    let layout = Layout { kind, rows, cols, ld, batch: 1, stride: 0 };
    status(out.set(lock().add(Object::Layout(layout))))
}

#[unsafe(no_mangle)]
pub extern "C" fn cublasLtMatmulPreferenceCreate(out: Out<u64>) -> Status {
    status(out.set(lock().add(Object::Preference(Preference::default()))))
}

fn destroy(handle: u64, kind: fn(&Object) -> bool) -> Status {
    status(lock().remove(handle, kind).map(drop).ok_or(INVALID_VALUE))
}

#[unsafe(no_mangle)]
pub extern "C" fn cublasLtMatmulDescDestroy(handle: u64) -> Status {
    destroy(handle, |object| matches!(object, Object::Desc(_)))
}

#[unsafe(no_mangle)]
pub extern "C" fn cublasLtMatrixLayoutDestroy(handle: u64) -> Status {
    destroy(handle, |object| matches!(object, Object::Layout(_)))
}

#[unsafe(no_mangle)]
pub extern "C" fn cublasLtMatmulPreferenceDestroy(handle: u64) -> Status {
    destroy(handle, |object| matches!(object, Object::Preference(_)))
}

#[unsafe(no_mangle)]
pub extern "C" fn cublasLtMatmulDescSetAttribute(handle: u64, which: u32, value: In<c_void>, size: usize) -> Status {
    status((|| {
        let mut objects = lock();
        let desc = objects.desc_mut(handle)?;
        let value = value.integer(size, 4)?;
        let matrix = match which {
            DESC_TRANSA => 0,
            DESC_TRANSB => 1,
            _ => return Err(INVALID_VALUE),
        };
        desc.transposed[matrix] = match value {
            0 => false,
            1 => true,
            _ => return Err(INVALID_VALUE),
        };
        Ok(())
    })())
}

#[unsafe(no_mangle)]
pub extern "C" fn cublasLtMatrixLayoutSetAttribute(handle: u64, which: u32, value: In<c_void>, size: usize) -> Status {
    status((|| {
        let mut objects = lock();
        let layout = objects.layout_mut(handle)?;
        match which {
            LAYOUT_BATCH_COUNT => layout.batch = value.integer(size, 4)?,
            LAYOUT_STRIDED_BATCH_OFFSET => layout.stride = value.integer(size, 8)? as i64,
            _ => return Err(INVALID_VALUE),
        }
        Ok(())
    })())
}

#[unsafe(no_mangle)]
pub extern "C" fn cublasLtMatmulPreferenceSetAttribute(
    handle: u64,
    which: u32,
    value: In<c_void>,
    size: usize,
) -> Status {
    status((|| {
        let mut objects = lock();
        let preference = objects.preference_mut(handle)?;
        match which {
            PREF_MAX_WORKSPACE_BYTES => preference.workspace = value.integer(size, 8)?,
            PREF_MIN_ALIGNMENT_A..=PREF_MIN_ALIGNMENT_D => {
                let bytes = value.integer(size, 4)?;
                if !bytes.is_power_of_two() {
                    return Err(INVALID_VALUE);
                }
                preference.alignments[(which - PREF_MIN_ALIGNMENT_A) as usize] = bytes;
            }
            _ => return Err(INVALID_VALUE),
        }
        Ok(())
    })())
}

#[unsafe(no_mangle)]
pub extern "C" fn cublasLtMatmulAlgoGetHeuristic(
    handle: u64,
    desc: u64,
    a: u64,
    b: u64,
    c: u64,
    d: u64,
    preference: u64,
    wanted: c_int,
    out: Out<HeuristicResult>,
    count: Out<c_int>,
) -> Status {
    status((|| {
        let mut objects = lock();
        objects.handle(handle)?;
        objects.counts.heuristics += 1;
        let preference = *objects.preference(preference)?;
        let shape = objects.shape(desc, [a, b, c, d])?;
        let refused = objects.refuses(2) || objects.refuses(4) && shape.layouts[3].batch > 1;
        if wanted < 1 {
            return Err(INVALID_VALUE);
        }
        let algo = rules::heuristic(&shape, &preference)?;
        count.set(i32::from(!refused))?;
        out.set(HeuristicResult::of(algo))
    })())
}

#[unsafe(no_mangle)]
pub extern "C" fn cublasLtMatmul(
    handle: u64,
    desc: u64,
    alpha: In<f32>,
    a: u64,
    a_layout: u64,
    b: u64,
    b_layout: u64,
    beta: In<f32>,
    c: u64,
    c_layout: u64,
    d: u64,
    d_layout: u64,
    algo: In<Algo>,
    workspace: u64,
    workspace_bytes: usize,
    stream: u64,
) -> Status {
    status((|| {
        let mut objects = lock();
        let module = objects.handle(handle)?;
        if objects.refuses(3) {
            return Err(EXECUTION_FAILED);
        }
        let shape = objects.shape(desc, [a_layout, b_layout, c_layout, d_layout])?;
        if objects.refuses(5) && shape.layouts[3].batch > 1 {
            return Err(NOT_SUPPORTED);
        }
        let (alpha, beta, algo) = (alpha.get()?, beta.get()?, algo.get()?);
        let addresses = [a, b, c, d];
        let workspace = rules::check(&shape, &algo, addresses, (workspace, workspace_bytes as u64))?;
        objects.counts.products += 1;
        objects.counts.batches += shape.layouts[3].batch;
        let alignment = 1 << a.trailing_zeros().min(8);
        objects.counts.least_alignment = objects.counts.least_alignment.min(alignment);
        drop(objects);
        module.launch(Job::new(&shape, addresses, (alpha, beta), workspace), stream)
    })())
}

// ---- for tests ----

/// From now on: 1 fails `cublasLtCreate`, 2 has heuristics find nothing, 3 fails products; 4 has heuristics find
/// nothing for several batches, 5 has products of several batches not supported; 0 refuses nothing.
#[unsafe(no_mangle)]
pub extern "C" fn fakecublaslt_refuse(what: u32) {
    lock().refuse(what);
}

/// 0: heuristics asked for; 1: products made; 2: the least alignment of a product's first matrix, in bytes; 3: objects
/// that were not given back; 4: batches of the products made. Once read, all but 3 begin anew.
#[unsafe(no_mangle)]
pub extern "C" fn fakecublaslt_count(which: u32) -> u64 {
    lock().count(which)
}
