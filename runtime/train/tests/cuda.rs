//! Updates on a GPU have the bits of the host. The kernels' own source runs over the emulated driver, or on a GPU where
//! `OUTCORE_TEST_GPU` names one.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::path::Path;

use cudarc::driver::{CudaContext, result};
use outcore::durable::DurableOptions;
use outcore::{Bytes, DType, ErrorKind, PageSize, PolicyKind, Runtime, Tensor};
use outcore_testkit::emulated_kernels::{Driver, EmulatedKernels, folder};
use outcore_train::{AdamW, CudaKernels, DeviceRule, Group, Moment, Optimizer, OptimizerBuilder, Rule, Schedule, Sgd};
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
        // SAFETY: the kernels were compiled from the sources of this package.
        Some(file) => unsafe { CudaKernels::open_from(&driver.device, file) }.unwrap(),
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

/// A rule with one state, and with this one on a device.
#[derive(Debug)]
struct Own(Option<DeviceRule>);

impl Rule for Own {
    fn name(&self) -> &'static str {
        "own"
    }
    fn states(&self) -> &'static [&'static str] {
        &["state"]
    }
    fn check(&self) -> outcore::Result<()> {
        Ok(())
    }
    fn update(&self, _: Moment, _: &mut [f32], _: &[f32], _: &mut [&mut [f32]]) {}
    fn on_device(&self) -> Option<DeviceRule> {
        self.0
    }
}

#[test]
fn what_has_no_kernels_is_refused_by_name() {
    let Some(driver) = driver("what_has_no_kernels_is_refused_by_name") else { return };
    let on_gpu = runtime(Some(&driver), 30);
    let error = builder(&on_gpu, 0.0).open().unwrap_err();
    assert!(error.kind() == ErrorKind::Unsupported && error.to_string().contains("kernels"), "{error}");
    let refused = |on_device: Option<DeviceRule>| {
        let own = Group::new(Own(on_device), Schedule::constant(1.0)).parameter("p", &[10]);
        Optimizer::builder(&on_gpu).group(own).cuda(kernels(&driver)).open().unwrap_err()
    };
    let error = refused(None);
    assert!(error.kind() == ErrorKind::Unsupported && error.to_string().contains("\"own\""), "{error}");
    // More states than the rule keeps, and settings out of range.
    let error = refused(Some(DeviceRule::AdamW(AdamW::default())));
    assert!(error.kind() == ErrorKind::InvalidArgument && error.to_string().contains("exp_avg_sq"), "{error}");
    let error = refused(Some(DeviceRule::Sgd(Sgd { momentum: 1.5, weight_decay: 0.0 })));
    assert!(error.kind() == ErrorKind::InvalidArgument && error.to_string().contains("momentum"), "{error}");
    on_gpu.close().unwrap();
    let on_host = runtime(None, 30);
    let error = builder(&on_host, 0.0).cuda(kernels(&driver)).open().unwrap_err();
    assert!(error.kind() == ErrorKind::Unsupported && error.advice().is_some(), "{error}");
    let scratch = scratch();
    let file = scratch.path().join("kernels.ptx");
    // SAFETY: the file is not there, and later has none of the kernels, so none is launched.
    let refused = || unsafe { CudaKernels::open_from(&driver.device, &file) }.unwrap_err();
    let error = refused();
    assert!(error.to_string().contains("kernels.ptx"), "{error}");
    std::fs::write(&file, ".version 8.0\n.target sm_80\n.address_size 64\n.visible .entry other()\n{\nret;\n}\n")
        .unwrap();
    let error = refused();
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
    let mut optimizer = one_thread(builder(&runtime, 0.9)).cuda(kernels(&driver)).open_in(&state).unwrap();
    initialise(&runtime, &mut optimizer);
    optimizer.commit(&json!(0)).unwrap();
    let launch = "cuLaunchKernel";
    // The gradients were added, and are not summed up.
    fake.fail_nth(launch, 2, NO_RESOURCES);
    let error = optimizer.accumulate("a", 0, &[1.0; 100], 1.0).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Device, "{error}");
    assert!(optimizer.step(1.0).unwrap_err().to_string().contains("added some"));
    optimizer.drop_gradients().unwrap();
    add_gradients(&optimizer, 1);
    // The second part of the second block.
    fake.fail_nth(launch, 3, NO_RESOURCES);
    let error = optimizer.step(1.0).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Device, "{error}");
    assert!(optimizer.step(1.0).unwrap_err().to_string().contains("half updated"));
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

/// Before the first launch nothing has changed: the call is repeated, and its results have the bits of the host.
#[test]
fn what_fails_before_its_first_launch_can_be_repeated() {
    let Some(driver) = driver("what_fails_before_its_first_launch_can_be_repeated") else { return };
    let Some(fake) = &driver.fake else { return };
    let on_gpu = runtime(Some(&driver), 64);
    let mut optimizer = one_thread(builder(&on_gpu, 0.9)).cuda(kernels(&driver)).open().unwrap();
    initialise(&on_gpu, &mut optimizer);
    for call in ["cuMemsetD8Async", "cuMemcpyHtoDAsync", "cuLaunchKernel"] {
        fake.fail_nth(call, 1, NO_RESOURCES);
        let error = optimizer.accumulate("b", 0, &[1.0; 5], 1.0).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Device, "{call}: {error}");
    }
    // Nothing was added.
    let error = optimizer.step(1.0).unwrap_err();
    assert!(error.to_string().contains("no gradient"), "{error}");
    add_gradients(&optimizer, 1);
    fake.fail_nth("cuLaunchKernel", 1, NO_RESOURCES);
    assert_eq!(optimizer.step(1.0).unwrap_err().kind(), ErrorKind::Device);
    optimizer.step(1.0).unwrap();
    let found: Vec<_> = SIZES.iter().map(|(name, _)| read(&on_gpu, &optimizer.parameter(name).unwrap())).collect();
    drop(optimizer);
    on_gpu.close().unwrap();
    assert!(found == after_one_step_on_the_host(), "the repeated step has other bits");
    driver.finish();
}

fn one_thread(builder: OptimizerBuilder) -> OptimizerBuilder {
    builder.threads(std::num::NonZeroUsize::MIN)
}

fn after_one_step_on_the_host() -> Vec<Vec<u8>> {
    let on_host = runtime(None, 64);
    let mut optimizer = builder(&on_host, 0.9).open().unwrap();
    initialise(&on_host, &mut optimizer);
    let found = results(&on_host, optimizer, 1).1;
    on_host.close().unwrap();
    found
}

/// The runtime refuses to wait for the stream, and whatever was launched has ended all the same when the call returns.
#[test]
fn a_call_that_fails_has_waited_for_what_it_launched() {
    let Some(driver) = driver("a_call_that_fails_has_waited_for_what_it_launched") else { return };
    let Some(fake) = &driver.fake else { return };
    let on_gpu = runtime(Some(&driver), 64);
    let mut optimizer = one_thread(builder(&on_gpu, 0.9)).cuda(kernels(&driver)).open().unwrap();
    initialise(&on_gpu, &mut optimizer);
    fake.set_delay(3000, 7);
    add_gradients(&optimizer, 1);
    let before = fake.calls("cuStreamSynchronize");
    // What the runtime asks before it waits.
    fake.fail_nth("cuStreamIsCapturing", 1, NO_RESOURCES);
    optimizer.accumulate("a", 0, &[1.0; 100], 1.0).unwrap_err();
    assert_eq!(fake.calls("cuStreamSynchronize"), before + 1);
    // It is not known whether all of it was added.
    assert!(optimizer.step(1.0).unwrap_err().to_string().contains("added some"));
    optimizer.drop_gradients().unwrap();
    add_gradients(&optimizer, 1);
    fake.fail_nth("cuStreamIsCapturing", 1, NO_RESOURCES);
    optimizer.step(1.0).unwrap_err();
    assert_eq!(fake.calls("cuStreamSynchronize"), before + 2);
    assert!(optimizer.step(1.0).unwrap_err().to_string().contains("half updated"));
    fake.set_delay(0, 0);
    drop(optimizer);
    on_gpu.close().unwrap();
    driver.finish();
}

/// A runtime that is closed beside steps: they end with an error, and nothing runs on pages that are gone.
#[test]
fn a_runtime_may_be_closed_beside_steps() {
    let Some(driver) = driver("a_runtime_may_be_closed_beside_steps") else { return };
    let Some(fake) = &driver.fake else { return };
    for round in 0..6 {
        let on_gpu = runtime(Some(&driver), 18);
        let mut optimizer = builder(&on_gpu, 0.9).cuda(kernels(&driver)).open().unwrap();
        initialise(&on_gpu, &mut optimizer);
        fake.set_delay(500, round);
        let (begun, beside) = (std::sync::Barrier::new(2), on_gpu.clone());
        std::thread::scope(|threads| {
            let begun_beside = &begun;
            threads.spawn(move || {
                begun_beside.wait();
                beside.close().unwrap();
            });
            begun.wait();
            let error = loop {
                let added = SIZES
                    .iter()
                    .try_for_each(|(name, size)| optimizer.accumulate(name, 0, &generated(round, 0.5, *size), 1.0));
                if let Err(error) = added.and_then(|()| optimizer.step(1.0).map(drop)) {
                    break error;
                }
            };
            assert_eq!(error.kind(), ErrorKind::Closed, "{error}");
        });
        fake.set_delay(0, 0);
        drop(optimizer);
    }
    driver.finish();
}

/// Some threads add to blocks that others add to as well, and two optimizers use the same kernels at the same time.
#[test]
fn threads_and_optimizers_share_kernels() {
    let Some(driver) = driver("threads_and_optimizers_share_kernels") else { return };
    let kernels = kernels(&driver);
    let run = |runtime: &Runtime, with: Option<CudaKernels>| {
        let builder = with.into_iter().fold(builder(runtime, 0.9), OptimizerBuilder::cuda);
        let mut optimizer = builder.open().unwrap();
        initialise(runtime, &mut optimizer);
        for step in 1..=2 {
            std::thread::scope(|threads| {
                for (at, (name, size)) in SIZES.iter().enumerate() {
                    let optimizer = &optimizer;
                    threads.spawn(move || {
                        let values = generated(step * 10 + at as u64, 0.5, *size);
                        optimizer.accumulate(name, 0, &values, 0.5).unwrap();
                        optimizer.accumulate(name, size / 2, &values[..(size / 3) as usize], 1.0).unwrap();
                    });
                }
            });
            optimizer.step(1.0).unwrap();
        }
        SIZES.iter().map(|(name, _)| read(runtime, &optimizer.parameter(name).unwrap())).collect::<Vec<_>>()
    };
    let on_host = runtime(None, 64);
    let expected = run(&on_host, None);
    on_host.close().unwrap();
    let both = [runtime(Some(&driver), 64), runtime(Some(&driver), 20)];
    let found = std::thread::scope(|threads| {
        let run = &run;
        let started = both.each_ref().map(|runtime| threads.spawn(|| run(runtime, Some(kernels.clone()))));
        started.map(|started| started.join().unwrap())
    });
    assert!(found.iter().all(|found| *found == expected), "other bits than on the host");
    both.into_iter().for_each(|runtime| runtime.close().unwrap());
    drop(kernels);
    driver.finish();
}

/// A part of a block that is copied to the GPU in several pieces.
#[test]
fn more_gradients_than_are_staged_at_a_time() {
    let Some(driver) = driver("more_gradients_than_are_staged_at_a_time") else { return };
    let size = (1 << 21) + 12_345;
    let run = |driver: Option<&Driver>| {
        // A block has 2^21 elements.
        let builder = Runtime::builder().page_size(PageSize::new(Bytes::mib(4)).unwrap());
        let builder = builder.device_budget(Bytes::mib(80));
        let runtime = match driver {
            Some(driver) => builder.device(driver.device.clone()).open().unwrap(),
            None => builder.open().unwrap(),
        };
        let group = Group::new(Sgd::default(), Schedule::constant(0.5)).parameter("p", &[size]);
        let builder =
            driver.map(kernels).into_iter().fold(Optimizer::builder(&runtime).group(group), OptimizerBuilder::cuda);
        let mut optimizer = builder.open().unwrap();
        for (at, first) in [0, 77].into_iter().enumerate() {
            optimizer.accumulate("p", first, &generated(at as u64, 1.0, size - first), 1.0).unwrap();
        }
        let norm = optimizer.step(1.0).unwrap().norm;
        let found = (norm.to_bits(), read(&runtime, &optimizer.parameter("p").unwrap()));
        drop(optimizer);
        runtime.close().unwrap();
        found
    };
    assert!(run(Some(&driver)) == run(None), "other bits than on the host");
    driver.finish();
}

/// Programs that use several GPUs have one of them current on each thread.
#[test]
fn a_step_leaves_the_threads_context_as_it_was() {
    let Some(driver) = driver("a_step_leaves_the_threads_context_as_it_was") else { return };
    let Some(fake) = &driver.fake else { return };
    fake.set_devices(2);
    let on_gpu = runtime(Some(&driver), 64);
    let mut optimizer = builder(&on_gpu, 0.9).cuda(kernels(&driver)).with_working_copy().open().unwrap();
    let other = CudaContext::new(1).unwrap();
    for current in [other.cu_ctx(), std::ptr::null_mut()] {
        // SAFETY: `other` lives to the end of the test.
        unsafe { result::ctx::set_current(current) }.unwrap();
        add_gradients(&optimizer, 1);
        optimizer.step(1.0).unwrap();
        optimizer.refresh_working_copy().unwrap();
        let found = result::ctx::get_current().unwrap().unwrap_or(std::ptr::null_mut());
        assert_eq!(found, current);
    }
    drop((optimizer, other));
    on_gpu.close().unwrap();
    driver.finish();
}
