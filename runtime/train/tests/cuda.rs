//! Updates on a GPU have the bits of the host. The kernels' own source runs over the emulated driver, or on a GPU where
//! `OUTCORE_TEST_GPU` names one.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::path::Path;

use outcore::durable::DurableOptions;
use outcore::{Bytes, DType, ErrorKind, PageSize, PolicyKind, Runtime, Tensor};
use outcore_testkit::emulated_kernels::{Driver, EmulatedKernels, folder};
use outcore_train::{AdamW, CudaKernels, Group, Moment, Optimizer, OptimizerBuilder, Rule, Schedule, Sgd};
use serde_json::json;

static KERNELS: EmulatedKernels = EmulatedKernels::new(&[
    ("cuda/kernels.cu", include_str!("../cuda/kernels.cu")),
    (EmulatedKernels::UNIT, include_str!("cuda/emulation.cpp")),
]);

/// Some share pages, and one has more elements than a block.
const SIZES: [(&str, u64); 6] = [("a", 40_000), ("b", 5), ("c", 70_001), ("d", 1), ("e", 9_999), ("f", 64)];

/// On a disk: a durable folder lies nowhere else. What runs on a GPU may have been built on another machine.
fn scratch() -> tempfile::TempDir {
    match std::env::var_os("OUTCORE_TEST_GPU") {
        Some(_) => tempfile::tempdir().unwrap(),
        None => tempfile::tempdir_in(folder()).unwrap(),
    }
}

fn driver(test: &str) -> Option<Driver> {
    let driver = KERNELS.driver(test)?;
    if let Some(fake) = &driver.fake {
        fake.set_granularity(4096);
    }
    Some(driver)
}

/// 64 KiB, or what a GPU can map.
fn page_of(driver: Option<&Driver>) -> PageSize {
    let is_gpu = driver.is_some_and(|driver| driver.fake.is_none());
    PageSize::new(if is_gpu { Bytes::mib(2) } else { Bytes::kib(64) }).unwrap()
}

fn runtime(driver: Option<&Driver>, pages: u64) -> Runtime {
    let page = page_of(driver);
    let builder = Runtime::builder().page_size(page).device_budget(Bytes::new(page.bytes() * pages));
    let builder = builder.policy(PolicyKind::Plan);
    match driver {
        Some(driver) => builder.device(driver.device.clone()).open().unwrap(),
        None => builder.open().unwrap(),
    }
}

fn kernels(driver: &Driver) -> CudaKernels {
    match &driver.kernels {
        Some(file) => CudaKernels::open_from(&driver.device, file).unwrap(),
        None => CudaKernels::open(&driver.device).unwrap(),
    }
}

fn generated(seed: u64, scale: f32, elements: u64) -> Vec<f32> {
    let mut x = seed;
    let next = || {
        x = x.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((x >> 40) as f32 / (1 << 23) as f32 - 1.0) * scale
    };
    std::iter::repeat_with(next).take(elements as usize).collect()
}

fn read(runtime: &Runtime, tensor: &Tensor) -> Vec<u8> {
    let guard = runtime.pin(tensor).on_device().wait().unwrap();
    let mut bytes = vec![0; guard.device_bytes(0).unwrap().len.get() as usize];
    guard.copy_out(0, 0, &mut bytes).unwrap();
    bytes
}

fn builder(runtime: &Runtime, momentum: f64) -> OptimizerBuilder {
    let mut groups = [
        Group::new(AdamW { weight_decay: 0.1, ..AdamW::default() }, Schedule::constant(3e-3).warm_up(2)),
        Group::new(Sgd { momentum, weight_decay: 0.01 }, Schedule::constant(1e-2)),
    ];
    for (at, (name, size)) in SIZES.iter().enumerate() {
        let group = &mut groups[at % 2];
        *group = group.clone().parameter(*name, &[*size]);
    }
    groups.into_iter().fold(Optimizer::builder(runtime), OptimizerBuilder::group)
}

fn initialise(runtime: &Runtime, optimizer: &mut Optimizer) {
    for (at, (name, size)) in SIZES.iter().enumerate() {
        let values = generated(7 * at as u64, 1.0, *size);
        let tensor = optimizer.parameter(name).unwrap();
        let mut guard = runtime.pin(&tensor).write().on_device().wait().unwrap();
        guard.copy_in(0, 0, bytemuck::cast_slice(&values)).unwrap();
    }
    optimizer.refresh_working_copy().unwrap();
}

/// Gradients of a step, whole and in parts. Some steps leave blocks without any.
fn add_gradients(optimizer: &Optimizer, step: u64) {
    for (at, (name, size)) in SIZES.iter().enumerate() {
        let seed = step * 100 + at as u64;
        let len = if step == 2 && *name == "c" { 100 } else { *size };
        optimizer.accumulate(name, 0, &generated(seed, 0.5, len), 1.0).unwrap();
        optimizer.accumulate(name, size / 3, &generated(seed + 50, 2.0, size / 2), 0.25).unwrap();
    }
}

/// All that steps make: norms, parameters, and working copies where there are any.
fn results(runtime: &Runtime, mut optimizer: Optimizer, steps: u64) -> (Vec<u64>, Vec<Vec<u8>>) {
    let mut norms = Vec::new();
    for step in 1..=steps {
        add_gradients(&optimizer, step);
        norms.push(optimizer.step(1.0).unwrap().norm.to_bits());
    }
    let of = |name: &str| {
        let copy = optimizer.working_copy(name).ok();
        let tensors = [Some(optimizer.parameter(name).unwrap()), copy].into_iter().flatten();
        tensors.map(|tensor| read(runtime, &tensor)).collect::<Vec<_>>().concat()
    };
    (norms, SIZES.iter().map(|(name, _)| of(name)).collect())
}

#[test]
fn updates_on_a_gpu_have_the_bits_of_the_host() {
    let Some(driver) = driver("updates_on_a_gpu_have_the_bits_of_the_host") else { return };
    for (gradients, momentum, has_copy) in
        [(DType::F32, 0.9, true), (DType::BF16, 0.9, false), (DType::BF16, 0.0, true), (DType::F32, 0.0, false)]
    {
        let made = |runtime: Runtime, kernels: Option<CudaKernels>| {
            let builder = builder(&runtime, momentum).gradients(gradients).clip(20.0);
            let builder = if has_copy { builder.with_working_copy() } else { builder };
            let builder = kernels.into_iter().fold(builder, OptimizerBuilder::cuda);
            let mut optimizer = builder.open().unwrap();
            initialise(&runtime, &mut optimizer);
            let found = results(&runtime, optimizer, 4);
            runtime.close().unwrap();
            found
        };
        let expected = made(runtime(None, 256), None);
        for pages in [18, 256] {
            let found = made(runtime(Some(&driver), pages), Some(kernels(&driver)));
            assert_eq!(found.0, expected.0, "norms, {gradients}, {pages} pages");
            for (((name, _), found), expected) in SIZES.iter().zip(&found.1).zip(&expected.1) {
                let wrong = found.iter().zip(expected).position(|(found, expected)| found != expected);
                assert_eq!((found.len(), wrong), (expected.len(), None), "{name}, {gradients}, {pages} pages");
            }
        }
    }
    // Each kernel of the sources was run by that.
    if let Some(ran) = KERNELS.that_ran() {
        let mut missing = KERNELS.names("updates_on_a_gpu_have_the_bits_of_the_host").unwrap();
        missing.retain(|name| !ran.contains(name) && !name.starts_with("train_interface"));
        assert!(missing.is_empty(), "{missing:?} did not run");
    }
    driver.finish();
}

/// What the program's PTX has are the kernels that the tests run.
#[test]
fn the_programs_ptx_has_the_kernels_of_the_sources() {
    let Some(mut named) = KERNELS.names("the_programs_ptx_has_the_kernels_of_the_sources") else { return };
    let ptx = include_str!("../cuda/kernels.ptx");
    let entries = ptx.split(".visible .entry ").skip(1).map(|rest| rest.split('(').next().unwrap().to_owned());
    let mut compiled: Vec<String> = entries.collect();
    compiled.sort_unstable();
    named.sort_unstable();
    assert_eq!(compiled, named);
}

/// A training goes on from a GPU to the host, and back.
#[test]
fn a_folder_of_a_gpu_is_one_of_the_host() {
    let Some(driver) = driver("a_folder_of_a_gpu_is_one_of_the_host") else { return };
    let scratch = scratch();
    let run = |path: &Path, driver_of_step: [Option<&Driver>; 4]| {
        for (step, driver) in (1..).zip(driver_of_step) {
            // Pages of one size, as a folder has.
            let runtime = runtime(driver, 30);
            let state = runtime.open_durable(path, DurableOptions::default()).unwrap();
            let builder = builder(&runtime, 0.9).gradients(DType::BF16);
            let builder = driver.map(kernels).into_iter().fold(builder, OptimizerBuilder::cuda);
            let mut optimizer = builder.open_in(&state).unwrap();
            assert_eq!(optimizer.steps(), step - 1);
            if step == 1 {
                initialise(&runtime, &mut optimizer);
            }
            add_gradients(&optimizer, step);
            optimizer.step(1.0).unwrap();
            optimizer.commit(&json!(step)).unwrap();
            // What comes after it is lost.
            add_gradients(&optimizer, 77);
            optimizer.step(1.0).unwrap();
            if step == 2 {
                optimizer.rollback().unwrap();
                assert_eq!(optimizer.steps(), 2);
            }
            drop((optimizer, state));
            runtime.close().unwrap();
        }
        let runtime = runtime(driver_of_step[3], 30);
        let state = runtime.open_durable(path, DurableOptions::default()).unwrap();
        let bytes: Vec<Vec<u8>> = state.tensors().iter().map(|tensor| read(&runtime, tensor)).collect();
        drop(state);
        runtime.close().unwrap();
        bytes
    };
    // A GPU has pages of 2 MiB, and the host's are smaller here.
    let host = if driver.fake.is_some() { None } else { Some(&driver) };
    let expected = run(&scratch.path().join("host"), [None; 4]);
    let found = run(&scratch.path().join("both"), [Some(&driver), host, Some(&driver), host]);
    assert!(found == expected, "a state differs");
    driver.finish();
}

#[derive(Debug)]
struct Own;

impl Rule for Own {
    fn name(&self) -> &'static str {
        "own"
    }
    fn states(&self) -> &'static [&'static str] {
        &[]
    }
    fn check(&self) -> outcore::Result<()> {
        Ok(())
    }
    fn update(&self, _: Moment, _: &mut [f32], _: &[f32], _: &mut [&mut [f32]]) {}
}

#[test]
fn what_has_no_kernels_is_refused_by_name() {
    let Some(driver) = driver("what_has_no_kernels_is_refused_by_name") else { return };
    let on_gpu = runtime(Some(&driver), 30);
    let error = builder(&on_gpu, 0.0).open().unwrap_err();
    assert!(error.kind() == ErrorKind::Unsupported && error.to_string().contains("kernels"), "{error}");
    let own = Group::new(Own, Schedule::constant(1.0)).parameter("p", &[10]);
    let error = Optimizer::builder(&on_gpu).group(own).cuda(kernels(&driver)).open().unwrap_err();
    assert!(error.kind() == ErrorKind::Unsupported && error.to_string().contains("\"own\""), "{error}");
    on_gpu.close().unwrap();
    let on_host = runtime(None, 30);
    let error = builder(&on_host, 0.0).cuda(kernels(&driver)).open().unwrap_err();
    assert!(error.kind() == ErrorKind::Unsupported && error.advice().is_some(), "{error}");
    let scratch = scratch();
    let file = scratch.path().join("kernels.ptx");
    let error = CudaKernels::open_from(&driver.device, &file).unwrap_err();
    assert!(error.to_string().contains("kernels.ptx"), "{error}");
    std::fs::write(&file, ".version 8.0\n.target sm_80\n.address_size 64\n.visible .entry other()\n{\nret;\n}\n")
        .unwrap();
    let error = CudaKernels::open_from(&driver.device, &file).unwrap_err();
    assert!(error.kind() == ErrorKind::Unsupported && error.to_string().contains("train_interface"), "{error}");
    driver.finish();
}

/// CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES.
const NO_RESOURCES: u32 = 701;

/// Gradients are dropped and added again; a step that may have updated some of a block goes back to the last commit.
#[test]
fn a_launch_that_fails_is_no_silent_loss() {
    let Some(driver) = driver("a_launch_that_fails_is_no_silent_loss") else { return };
    let Some(fake) = &driver.fake else { return };
    let scratch = scratch();
    let runtime = runtime(Some(&driver), 64);
    let state = runtime.open_durable(scratch.path().join("state"), DurableOptions::default()).unwrap();
    let mut optimizer = builder(&runtime, 0.9).cuda(kernels(&driver)).open_in(&state).unwrap();
    initialise(&runtime, &mut optimizer);
    optimizer.commit(&json!(0)).unwrap();
    let launch = "cuLaunchKernel";
    fake.fail_nth(launch, 1, NO_RESOURCES);
    let error = optimizer.accumulate("a", 0, &[1.0; 100], 1.0).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Device, "{error}");
    assert!(optimizer.step(1.0).unwrap_err().to_string().contains("accumulate"));
    optimizer.drop_gradients().unwrap();
    add_gradients(&optimizer, 1);
    // The second part of a block.
    fake.fail_nth(launch, 2, NO_RESOURCES);
    let error = optimizer.step(1.0).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Device, "{error}");
    assert!(optimizer.step(1.0).unwrap_err().advice().is_some());
    optimizer.rollback().unwrap();
    let repeated = results(&runtime, optimizer, 1);
    drop(state);
    runtime.close().unwrap();
    let on_host = self::runtime(None, 64);
    let mut optimizer = builder(&on_host, 0.9).open().unwrap();
    initialise(&on_host, &mut optimizer);
    assert!(repeated == results(&on_host, optimizer, 1), "the repeated step has other bits");
    driver.finish();
}
