//! The runtime on a CUDA device, over an emulated driver (`tests/fake-cuda`). The bytes are right, driver calls come in
//! the right order, and a failing call ends in an error. No GPU takes part unless `OUTCORE_REAL_CUDA=1` asks for one.
//! Then the tests of `cuda_real` run, and no others.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::sync::Arc;

use control::Fake;
use harness::{cuda_builder as builder, fail_every_call, only_pageable, watched};
use models::{Synthetic, synthetic};
use outcore::device::{Completion, Completions, Device, LinkModel, StreamKind, StreamOp};
use outcore::{Bytes, DType, DeviceBudget, Error, ErrorKind, Model, PageSize, Result, Runtime, RuntimeBuilder, Tensor};
use outcore_cuda::{CudaDeviceConfig, CudaDeviceSelector, cuda_devices};
use outcore_testkit::{fake_cuda as control, harness, models};

const PAGE: u64 = 2 << 20;
const OUT_OF_MEMORY: u32 = 2;
const ILLEGAL_ADDRESS: u32 = 700;
const NOT_PERMITTED: u32 = 800;
const NOT_SUPPORTED: u32 = 801;
const VIRTUAL_MEMORY: i32 = 102;

/// The GPU that `cuda`, or `cuda:` and a selector, names.
fn gpu(name: &str) -> CudaDeviceSelector {
    name.strip_prefix("cuda:").map_or_else(CudaDeviceSelector::default, |selector| selector.parse().unwrap())
}

fn refusal(builder: RuntimeBuilder) -> Error {
    let error = builder.open().unwrap_err();
    assert!(error.advice().is_some(), "what to do about it? {error}");
    error
}

/// Opening fails with an error of this kind, whose message and advice hold these words.
fn assert_refused(builder: RuntimeBuilder, kind: ErrorKind, says: &[&str], remedy: &[&str]) {
    let error = refusal(builder);
    assert_explained(&error, kind, says, remedy);
}

fn assert_explained(error: &Error, kind: ErrorKind, says: &[&str], remedy: &[&str]) {
    assert_eq!(error.kind(), kind, "{error}");
    let (text, advice) = (error.to_string(), error.advice().unwrap_or_default());
    assert!(says.iter().all(|part| text.contains(part)), "{text:?} does not say {says:?}");
    assert!(remedy.iter().all(|part| advice.contains(part)), "{advice:?} does not say {remedy:?}");
}

#[test]
fn what_cannot_be_opened_says_why_and_what_to_do() {
    let Some(fake) = Fake::load_or_skip("what_cannot_be_opened_says_why_and_what_to_do") else { return };
    let cuda = |text: &str| builder(1, 0).device(gpu(text));
    fake.set_devices(0);
    assert_refused(
        builder(1, 0),
        ErrorKind::NotFound,
        &["cuda:0", "NO_DEVICE"],
        &["nvidia-smi", "CUDA_VISIBLE_DEVICES"],
    );
    fake.set_devices(1);
    let there = cuda_devices().unwrap().remove(0);
    let (uuid, pci) = (there.uuid.as_str(), there.pci.as_str());
    for wrong in ["cuda:3", "cuda:GPU-00000000-0000-0000-0000-000000000000", "cuda:ffff:3b:00.0"] {
        let selector = wrong.split_once(':').unwrap().1;
        let says = [wrong, selector, "the CUDA driver sees 0 (", uuid, pci];
        assert_refused(cuda(wrong), ErrorKind::NotFound, &says, &["name one of those", "CUDA_VISIBLE_DEVICES"]);
    }
    let mig = "MIG-00000000-0000-0000-0000-000000000000";
    let remedy = format!("CUDA_VISIBLE_DEVICES names: set it to {mig}");
    assert_refused(cuda(&format!("cuda:{mig}")), ErrorKind::NotFound, &[mig, uuid], &[&remedy]);
    fake.set_driver_version(11080);
    assert_refused(builder(1, 0), ErrorKind::Unsupported, &["too old", "CUDA 11.8"], &["CUDA 12.0 or newer"]);
    fake.set_driver_version(13000);
    fake.set_attribute(VIRTUAL_MEMORY, 0);
    assert_refused(builder(1, 0), ErrorKind::Unsupported, &["virtual memory management"], &["host device"]);
    fake.set_attribute(VIRTUAL_MEMORY, 1);
    let small = builder(1, 0).page_size(PageSize::new(Bytes::kib(64)).unwrap());
    assert_refused(small, ErrorKind::InvalidArgument, &["64.0 KiB", "cuda:0", "2.0 MiB"], &["pages of 2.0 MiB"]);
    let none = builder(1, 0).device_budget(Bytes::new(PAGE - 1));
    assert_refused(none, ErrorKind::BudgetTooSmall, &["holds no page of 2.0 MiB"], &["at least 2.0 MiB"]);
    let link = LinkModel::new(Bytes::gib(1), std::time::Duration::ZERO, false).unwrap();
    assert_refused(builder(1, 0).link(link), ErrorKind::InvalidArgument, &["modelled link"], &["leave the link out"]);
    builder(1, 0).open().unwrap().close().unwrap();
    fake.finish();
}

#[test]
fn a_budget_that_is_not_free_names_who_could_make_room() {
    let Some(fake) = Fake::load_or_skip("a_budget_that_is_not_free_names_who_could_make_room") else { return };
    // A little more, for the GPU's page tables for host memory.
    fake.set_device_bytes((100 << 20) + (32 << 10));
    let processes = "nvidia-smi --query-compute-apps=pid";
    let says = ["102.0 MiB more", "cuda:0", "100.0 MiB free of 100.0 MiB"];
    assert_refused(builder(51, 0), ErrorKind::OutOfMemory, &says, &["at most 100.0 MiB", processes]);
    let other = builder(30, 0).open().unwrap();
    let says = ["42.0 MiB more", "40.0 MiB free of 100.0 MiB", "other runtimes of this process hold 60.0 MiB"];
    assert_refused(
        builder(21, 0),
        ErrorKind::OutOfMemory,
        &says,
        &["at most 40.0 MiB", "set_device_budget", processes],
    );
    // The driver may give less memory than it said was free: the rest is in pieces, or was taken since.
    fake.fail_nth("cuMemCreate", 3, OUT_OF_MEMORY);
    let says = ["10.0 MiB more", "40.0 MiB free of 100.0 MiB", "hold 60.0 MiB"];
    let error = refusal(builder(5, 0));
    assert_explained(&error, ErrorKind::OutOfMemory, &says, &["at most 40.0 MiB", processes]);
    assert!(std::error::Error::source(&error).unwrap().to_string().contains("CUDA_ERROR_OUT_OF_MEMORY"), "{error}");
    assert_eq!(fake.used_bytes(0), 30 * PAGE, "frames that were made for nothing are given back");
    // A budget that grows too far stays what it was, and so do the bytes.
    let tensor = other.alloc(DType::U8, &[4, PAGE]).unwrap();
    write_and_check(&other, &tensor, 0).unwrap();
    let error = other.set_device_budget(Bytes::new(51 * PAGE)).unwrap_err();
    let says = ["42.0 MiB more", "40.0 MiB free of 100.0 MiB"];
    assert_explained(&error, ErrorKind::OutOfMemory, &says, &["at most 100.0 MiB", processes]);
    assert_eq!(other.stats().device.budget, Bytes::new(30 * PAGE));
    write_and_check(&other, &tensor, 1).unwrap();
    // A runtime that lowers its budget makes room for others.
    other.set_device_budget(Bytes::new(10 * PAGE)).unwrap();
    let third = builder(40, 0).open().unwrap();
    write_and_check(&other, &tensor, 2).unwrap();
    third.close().unwrap();
    drop(tensor);
    other.close().unwrap();
    fake.finish();
}

#[test]
fn a_budget_may_be_a_share_of_what_is_free() {
    let Some(fake) = Fake::load_or_skip("a_budget_may_be_a_share_of_what_is_free") else { return };
    // A little more, for the GPU's page tables for host memory.
    fake.set_device_bytes((101 << 20) + (32 << 10));
    let share = |text: &str| builder(1, 0).device_budget(text.parse::<DeviceBudget>().unwrap());
    let half = share("50%").open().unwrap();
    assert_eq!(half.stats().device.budget, Bytes::mib(50));
    let rest = share("100%-9MiB").open().unwrap();
    assert_eq!(rest.stats().device.budget, Bytes::mib(42));
    assert_eq!(fake.used_bytes(0), 92 << 20);
    let says = ["10% of what is free, but for 8.0 MiB", "which is 92", "2.0 MiB"];
    assert_refused(share("10%-8MiB"), ErrorKind::BudgetTooSmall, &says, &["at least 2.0 MiB"]);
    let tensor = rest.alloc(DType::U8, &[30, PAGE]).unwrap();
    write_and_check(&rest, &tensor, 0).unwrap();
    drop(tensor);
    rest.close().unwrap();
    half.close().unwrap();
    fake.finish();
}

#[test]
fn a_step_larger_than_the_budget_is_refused_and_smaller_ones_go_on() {
    let Some(fake) = Fake::load_or_skip("a_step_larger_than_the_budget_is_refused_and_smaller_ones_go_on") else {
        return;
    };
    let runtime = builder(3, 2).open().unwrap();
    let table = runtime.alloc(DType::U8, &[8, PAGE]).unwrap();
    let step = [table.rows(0..4).unwrap()];
    for error in
        [runtime.pin(&step).on_device().wait().unwrap_err(), runtime.pin(&step).write().on_device().wait().unwrap_err()]
    {
        assert_eq!(error.kind(), ErrorKind::BudgetTooSmall);
        let text = error.to_string();
        assert!(text.contains("8.0 MiB") && text.contains("6.0 MiB") && error.advice().is_some(), "{error}");
    }
    write_and_check(&runtime, &table, 0).unwrap();
    drop((table, step));
    runtime.close().unwrap();
    fake.finish();
}

/// A driver that is too old for a call refuses it every time. Here each call is refused in turn.
#[test]
fn a_driver_without_a_call_is_an_error_that_names_it() {
    let Some(fake) = Fake::load_or_skip("a_driver_without_a_call_is_an_error_that_names_it") else { return };
    let file = synthetic(&[3 << 20, 1 << 20]);
    let calls = [
        "cuDeviceGetUuid",
        "cuDeviceGetPCIBusId",
        "cuDevicePrimaryCtxRetain",
        "cuMemGetAllocationGranularity",
        "cuCtxGetStreamPriorityRange",
        "cuMemGetInfo",
        "cuMemCreate",
        "cuMemAddressReserve",
        "cuMemMap",
        "cuMemSetAccess",
        "cuStreamCreateWithPriority",
        "cuEventCreate",
        "cuEventRecord",
        "cuMemcpyHtoDAsync",
        "cuMemsetD8Async",
    ];
    for call in calls {
        fake.fail_from(call, 1, NOT_SUPPORTED);
        let Err(error) = a_little_of_everything(&file) else {
            // Without events the device waits for streams instead, so nothing fails.
            assert!(call.starts_with("cuEvent"), "{call}: nobody was told");
            Fake::start_over();
            continue;
        };
        let text =
            format!("{error} {}", std::error::Error::source(&error).map(ToString::to_string).unwrap_or_default());
        assert!(text.contains("CUDA_ERROR_NOT_SUPPORTED"), "{call}: {text}");
        assert!(error.advice().is_some_and(|advice| advice.contains("newer NVIDIA driver")), "{call}: {error}");
        only_pageable(&fake, call);
        Fake::start_over();
    }
    a_little_of_everything(&file).unwrap();
    fake.finish();
}

/// The device is lost during a pass, while it holds the only copy of some bytes. Every error has the cause, and the
/// process goes on.
#[test]
fn a_device_lost_in_a_pass_leaves_the_process_alive() {
    let Some(fake) = Fake::load_or_skip("a_device_lost_in_a_pass_leaves_the_process_alive") else { return };
    let file = synthetic(&[3 << 20, 1 << 20]);
    let runtime = builder(3, 0).open().unwrap();
    let model = runtime.open_model(&file.path).unwrap();
    let table = runtime.alloc(DType::U8, &[1, PAGE]).unwrap();
    write_and_check(&runtime, &table, 0).unwrap();
    fake.lose_device(ILLEGAL_ADDRESS);
    let error = check(&runtime, &model, &file, 0).unwrap_err();
    assert_explained(&error, ErrorKind::Device, &["cuda:0", "lost"], &["start the program again"]);
    assert!(format!("{error:?}").contains("ILLEGAL_ADDRESS"), "{error:?}");
    drop(model);
    let closed = runtime.close().unwrap_err();
    let text = format!("{closed} {closed:?}");
    assert!(text.contains("ILLEGAL_ADDRESS"), "{text}");
    drop(table);
    // The host device still works.
    Runtime::builder().device_budget(Bytes::new(4 * PAGE)).open().unwrap().close().unwrap();
    fake.take_findings();
}

/// Each of these codes means that the context is gone. The error names it, says what happened, and what to do.
#[test]
fn regression_every_way_to_lose_a_gpu_is_a_lost_device_by_name() {
    let Some(fake) = Fake::load_or_skip("regression_every_way_to_lose_a_gpu_is_a_lost_device_by_name") else { return };
    let ways = [
        (201, "CUDA_ERROR_INVALID_CONTEXT", "cudaDeviceReset"),
        (226, "CUDA_ERROR_CONTAINED", "Xid 94"),
        (709, "CUDA_ERROR_CONTEXT_IS_DESTROYED", "cudaDeviceReset"),
        (721, "CUDA_ERROR_TENSOR_MEMORY_LEAK", "compute-sanitizer"),
        (999, "CUDA_ERROR_UNKNOWN", "kernel log"),
    ];
    let file = synthetic(&[3 << 20]);
    for (code, name, happened) in ways {
        let runtime = builder(3, 0).open().unwrap();
        let model = runtime.open_model(&file.path).unwrap();
        check(&runtime, &model, &file, 0).unwrap();
        // One call fails with it. That this is the end is known from the code, and not from later calls.
        fake.fail_nth("cuCtxPushCurrent", 1, code);
        let error = check(&runtime, &model, &file, 0).and_then(|()| check(&runtime, &model, &file, 0)).unwrap_err();
        assert_explained(&error, ErrorKind::Device, &["cuda:0", "lost", name, happened], &["start the program again"]);
        assert!(runtime.close().unwrap_err().to_string().contains(name));
        drop(model);
        fake.take_findings();
    }
}

/// Another library resets the GPU under an open runtime.
#[test]
fn a_reset_by_others_is_a_lost_device() {
    let Some(fake) = Fake::load_or_skip("a_reset_by_others_is_a_lost_device") else { return };
    let file = synthetic(&[3 << 20]);
    let runtime = builder(3, 0).open().unwrap();
    let model = runtime.open_model(&file.path).unwrap();
    check(&runtime, &model, &file, 0).unwrap();
    outcore_testkit::cuda_calls::reset_device().unwrap();
    let error = check(&runtime, &model, &file, 0).unwrap_err();
    assert_explained(&error, ErrorKind::Device, &["cuda:0", "lost", "cudaDeviceReset"], &["start the program again"]);
    assert!(runtime.close().is_err());
    drop(model);
    fake.take_findings();
}

/// The error of `close` says which bytes are lost. It reports consecutive pages as one range.
#[test]
fn a_lost_device_names_what_was_only_there() {
    let Some(fake) = Fake::load_or_skip("a_lost_device_names_what_was_only_there") else { return };
    let file = synthetic(&[1 << 20]);
    let runtime = builder(8, 0).open().unwrap();
    let model = runtime.open_model(&file.path).unwrap();
    let (table, single) =
        (runtime.alloc(DType::U8, &[4, PAGE]).unwrap(), runtime.alloc(DType::U8, &[PAGE / 2]).unwrap());
    let written = runtime.alloc(DType::U8, &[1, PAGE + 1]).unwrap();
    write_and_check(&runtime, &written, 0).unwrap();
    while runtime.observe().snapshot(&written).pages.iter().any(|page| page.device.is_resident()) {
        runtime.evict(&written);
        std::thread::yield_now();
    }
    // Pages that are also on disk are not lost: those of `written` and of the model. Pages that were never written are
    // not lost either.
    check(&runtime, &model, &file, 0).unwrap();
    for row in [0, 1, 3] {
        let part = [table.rows(row..row + 1).unwrap()];
        runtime.pin(&part).write().on_device().wait().unwrap().copy_in(0, 0, &row_of(&table, row, 0)).unwrap();
    }
    runtime.pin(&single).write().on_device().wait().unwrap().copy_in(0, 0, &[1; 9]).unwrap();
    assert!(runtime.health().is_empty());
    fake.lose_device(ILLEGAL_ADDRESS);
    // This request is the first to notice the loss.
    runtime.pin(&written).on_device().wait().map(drop).unwrap_err();
    let expected = [
        format!("pages 0 to 1 of a read-write tensor U8 [4, {PAGE}] are lost (4.0 MiB)"),
        format!("page 3 of a read-write tensor U8 [4, {PAGE}] is lost (2.0 MiB)"),
        format!("page 0 of a read-write tensor U8 [{}] is lost (1.0 MiB)", PAGE / 2),
    ];
    // `health` says the same every time.
    for _ in 0..2 {
        let told: Vec<String> = runtime.health().iter().map(Error::to_string).collect();
        assert_eq!(told.len(), expected.len(), "{told:#?}");
        for (told, expected) in told.iter().zip(&expected) {
            assert!(told.contains(expected) && told.contains("ILLEGAL_ADDRESS"), "{told}");
        }
    }
    // The losses of dropped tensors are reported too.
    drop((table, single, written, model));
    let error = runtime.close().unwrap_err();
    let text = error.to_string();
    assert_eq!(error.kind(), ErrorKind::Device, "{text}");
    let says = format!(
        "4 pages are lost (7.0 MiB): pages 0 to 1 of a read-write tensor U8 [4, {PAGE}], page 3 of a read-write tensor \
         U8 [4, {PAGE}], page 0 of a read-write tensor U8 [{}]; the first, because of: the GPU cuda:0 failed",
        PAGE / 2
    );
    assert!(text.contains(&says) && text.contains("start the program again"), "{text}");
    assert_eq!(text.matches("ILLEGAL_ADDRESS").count(), 1, "said once: {text}");
    fake.take_findings();
}

/// Nothing uses the device after it is lost. So it is `close` that finds the loss and reports it.
#[test]
fn closing_finds_that_the_device_is_lost_and_names_what_was_only_there() {
    let Some(fake) = Fake::load_or_skip("closing_finds_that_the_device_is_lost_and_names_what_was_only_there") else {
        return;
    };
    let runtime = builder(3, 0).open().unwrap();
    let table = runtime.alloc(DType::U8, &[2, PAGE]).unwrap();
    write_and_check(&runtime, &table, 0).unwrap();
    fake.lose_device(ILLEGAL_ADDRESS);
    let text = runtime.close().unwrap_err().to_string();
    let says = format!("pages 0 to 1 of a read-write tensor U8 [2, {PAGE}] are lost (4.0 MiB): the GPU cuda:0 failed");
    assert!(text.starts_with(&says), "{text}");
    assert_eq!(text.matches("ILLEGAL_ADDRESS").count(), 1, "said once: {text}");
    drop(table);
    fake.take_findings();
}

#[test]
fn gpus_are_listed_and_opened_by_any_of_their_names() {
    let Some(fake) = Fake::load_or_skip("gpus_are_listed_and_opened_by_any_of_their_names") else { return };
    fake.set_devices(2);
    let found = cuda_devices().unwrap();
    assert_eq!(found.len(), 2);
    let second = &found[1];
    assert!(second.virtual_memory && second.memory > Bytes::ZERO && second.name.contains('1'), "{second:?}");
    // What `nvidia-smi -L` shows of an instance of a partitioned GPU.
    let mig = second.uuid.replacen("GPU", "MIG", 1);
    let names = [second.uuid.clone(), mig, second.pci.to_uppercase()].map(|name| format!("cuda:{name}"));
    for name in names.into_iter().chain(["cuda".to_owned()]) {
        let runtime = builder(2, 0).device(gpu(&name)).open().unwrap();
        let on_second = fake.used_bytes(1);
        assert_eq!(on_second, if name == "cuda" { 0 } else { 2 * PAGE }, "{name}");
        runtime.close().unwrap();
    }
    fake.finish();
}

/// Of a partitioned GPU a process sees one instance. It is opened by the UUID that `nvidia-smi -L` shows; another one
/// is not there, and the error says how to get it.
#[test]
fn an_instance_of_a_partitioned_gpu_is_opened_by_its_uuid() {
    let Some(fake) = Fake::load_or_skip("an_instance_of_a_partitioned_gpu_is_opened_by_its_uuid") else { return };
    let whole = cuda_devices().unwrap().remove(0);
    let mut seen = Vec::new();
    for instance in [3, 4] {
        fake.set_instance(instance);
        let found = cuda_devices().unwrap();
        assert_eq!((found.len(), &found[0].pci), (1, &whole.pci));
        assert!(found[0].name.contains("MIG"), "{:?}", found[0]);
        seen.push(found[0].uuid.replacen("GPU", "MIG", 1));
    }
    let (other, mine) = (&seen[0], &seen[1]);
    assert!(other != mine && *mine != whole.uuid.replacen("GPU", "MIG", 1));
    for name in [mine.clone(), mine.to_uppercase(), "0".to_owned()] {
        let runtime = builder(2, 0).device(gpu(&format!("cuda:{name}"))).open().unwrap();
        let tensor = runtime.alloc(DType::U8, &[3, PAGE]).unwrap();
        write_and_check(&runtime, &tensor, 0).unwrap();
        drop(tensor);
        runtime.close().unwrap();
    }
    for name in [other, &whole.uuid.replacen("GPU", "MIG", 1)] {
        let remedy = ["CUDA_VISIBLE_DEVICES", name.as_str()];
        assert_refused(builder(2, 0).device(gpu(&format!("cuda:{name}"))), ErrorKind::NotFound, &[name], &remedy);
    }
    // The GPU as a whole cannot be named either: its number and address mean the instance.
    let remedy = ["CUDA_VISIBLE_DEVICES"];
    assert_refused(
        builder(2, 0).device(gpu(&format!("cuda:{}", whole.uuid))),
        ErrorKind::NotFound,
        &[&whole.uuid],
        &remedy,
    );
    fake.finish();
}

#[test]
fn guards_that_would_give_slices_are_refused() {
    let Some(fake) = Fake::load_or_skip("guards_that_would_give_slices_are_refused") else { return };
    slices_are_refused();
    fake.finish();
}

fn slices_are_refused() {
    let runtime = builder(2, 0).open().unwrap();
    let tensors = [runtime.alloc(DType::U8, &[100]).unwrap()];
    let errors = [
        runtime.pin(&tensors[0]).wait().unwrap_err(),
        runtime.pin(&tensors[0]).write().wait().unwrap_err(),
        runtime.pin(&tensors).wait().unwrap_err(),
        runtime.pin(&tensors).write().wait().unwrap_err(),
    ];
    for error in errors {
        assert_eq!(error.kind(), ErrorKind::Unsupported);
        assert!(error.to_string().contains("cuda:0") && error.advice().unwrap().contains("on_device()"), "{error}");
    }
    let guard = runtime.pin(&tensors).on_device().wait().unwrap();
    assert_eq!(guard.address(0), Some(tensors[0].address()));
    assert_eq!(guard.address(1), None);
    assert_eq!(guard.copy_out(0, 90, &mut [0; 11]).unwrap_err().kind(), ErrorKind::InvalidArgument);
    drop((guard, tensors));
    runtime.close().unwrap();
}

/// Brings a tensor up and compares it with the file.
fn check(runtime: &Runtime, model: &Model, file: &Synthetic, n: usize) -> Result<()> {
    let tensor = model.tensor(&format!("t{n}"))?;
    let header = model.header().tensor(&format!("t{n}"))?;
    let expected = &file.bytes[header.offset as usize..][..header.len as usize];
    let mut bytes = vec![0; expected.len()];
    runtime.pin(&tensor).on_device().wait()?.copy_out(0, 0, &mut bytes)?;
    assert!(bytes == expected, "tensor {n} differs");
    Ok(())
}

fn row_of(tensor: &Tensor, row: u64, pass: u64) -> Vec<u8> {
    let len = tensor.size().get() / tensor.shape()[0];
    // A length no page is a multiple of, so that shifted or exchanged pages differ.
    let pattern: Vec<u8> = (0..251).map(|at| (at * 31 + row * 7 + pass * 3) as u8).collect();
    let mut bytes = pattern.repeat(len as usize / pattern.len() + 1);
    bytes.truncate(len as usize);
    bytes
}

/// Writes all rows of a read-write tensor, then compares all.
fn write_and_check(runtime: &Runtime, tensor: &Tensor, pass: u64) -> Result<()> {
    let rows = tensor.shape()[0];
    for row in 0..rows {
        let part = [tensor.rows(row..row + 1)?];
        runtime.pin(&part).write().on_device().wait()?.copy_in(0, 0, &row_of(tensor, row, pass))?;
    }
    for row in 0..rows {
        let part = [tensor.rows(row..row + 1)?];
        let expected = row_of(tensor, row, pass);
        let mut bytes = vec![0; expected.len()];
        runtime.pin(&part).on_device().wait()?.copy_out(0, 0, &mut bytes)?;
        assert!(bytes == expected, "row {row} of pass {pass} differs");
    }
    Ok(())
}

#[test]
fn a_model_larger_than_the_budget_streams_bit_for_bit() {
    let Some(fake) = Fake::load_or_skip("a_model_larger_than_the_budget_streams_bit_for_bit") else { return };
    fake.set_delay(200, 7);
    a_model_streams();
    fake.finish();
}

fn a_model_streams() {
    let lengths: Vec<usize> = (0..24).map(|n| 100_000 + n * 131_071 % 3_000_000).collect();
    let file = synthetic(&lengths);
    for (frames, host) in [(3, 0), (6, 0), (4, 5)] {
        let runtime = builder(frames, host).open().unwrap();
        let model = runtime.open_model(&file.path).unwrap();
        for pass in 0..3 {
            for n in 0..lengths.len() {
                check(&runtime, &model, &file, if pass == 1 { lengths.len() - 1 - n } else { n }).unwrap();
            }
        }
        let stats = runtime.stats();
        assert!(stats.traffic.peak_device <= stats.device.budget && stats.pager.evictions > 0, "{stats:?}");
        drop(model);
        runtime.close().unwrap();
    }
}

#[test]
fn read_write_tensors_go_to_disk_and_come_back() {
    let Some(fake) = Fake::load_or_skip("read_write_tensors_go_to_disk_and_come_back") else { return };
    fake.set_delay(200, 3);
    read_write_tensors();
    fake.finish();
}

fn read_write_tensors() {
    for (frames, host) in [(2, 0), (3, 2)] {
        let runtime = builder(frames, host).open().unwrap();
        let zeros = [runtime.alloc(DType::U8, &[5000]).unwrap()];
        let mut bytes = [1; 5000];
        runtime.pin(&zeros).on_device().wait().unwrap().copy_out(0, 0, &mut bytes).unwrap();
        assert_eq!(bytes, [0; 5000]);
        // Rows that begin and end within pages.
        let tensor = runtime.alloc(DType::U8, &[9, PAGE - 4096]).unwrap();
        for pass in 0..2 {
            write_and_check(&runtime, &tensor, pass).unwrap();
        }
        drop((tensor, zeros));
        runtime.close().unwrap();
    }
}

#[test]
fn unlocked_host_memory_costs_copies_and_no_correctness() {
    let Some(fake) = Fake::load_or_skip("unlocked_host_memory_costs_copies_and_no_correctness") else { return };
    let file = synthetic(&[3 << 20, 2 << 20, 1 << 20]);
    let pass = || {
        let runtime = builder(2, 1).open().unwrap();
        let model = runtime.open_model(&file.path).unwrap();
        (0..3).chain(0..3).for_each(|n| check(&runtime, &model, &file, n).unwrap());
        let tensor = runtime.alloc(DType::U8, &[4, PAGE]).unwrap();
        write_and_check(&runtime, &tensor, 0).unwrap();
        drop((tensor, model));
        runtime.close().unwrap();
    };
    fake.fail_from("cuMemHostRegister", 1, NOT_PERMITTED);
    pass();
    // The copies go through locked buffers of the streams, so the driver is never given pageable memory.
    fake.finish();
    fake.fail_from("cuMemHostAlloc", 1, OUT_OF_MEMORY);
    pass();
    let findings = fake.take_findings();
    assert!(findings.iter().all(|finding| finding.starts_with("pageable")), "{findings:#?}");
    fake.finish();
}

/// A little of everything, in as few calls as that takes.
fn a_little_of_everything(file: &Synthetic) -> Result<()> {
    let runtime = builder(2, 1).open()?;
    let used = (|| {
        let model = runtime.open_model(&file.path)?;
        (0..2).chain(0..2).try_for_each(|n| check(&runtime, &model, file, n))?;
        let tensor = runtime.alloc(DType::U8, &[3, PAGE])?;
        write_and_check(&runtime, &tensor, 0)?;
        runtime.set_device_budget(Bytes::new(PAGE))?;
        runtime.set_device_budget(Bytes::new(3 * PAGE))?;
        write_and_check(&runtime, &tensor, 1)
    })();
    let closed = runtime.close();
    used.and(closed)
}

#[test]
fn whatever_call_fails_ends_in_an_error_or_in_the_right_bytes() {
    if Fake::load_or_skip("whatever_call_fails_ends_in_an_error_or_in_the_right_bytes").is_none() {
        return;
    }
    let file = synthetic(&[3 << 20, 1 << 20]);
    let (runs, failed) = fail_every_call(move || a_little_of_everything(&file));
    assert!(runs > 33 && failed > 6, "{runs} runs, of which {failed} failed");
    eprintln!("{} calls failed one by one; {failed} made the program fail", runs - 1);
}

#[test]
fn a_lost_device_fails_everything_with_the_first_cause() {
    if Fake::load_or_skip("a_lost_device_fails_everything_with_the_first_cause").is_none() {
        return;
    }
    let file = Arc::new(synthetic(&[3 << 20, 1 << 20]));
    for n in 1.. {
        let (file, (tell, told)) = (Arc::clone(&file), std::sync::mpsc::channel());
        watched(&format!("losing the device at operation {n}"), move || {
            let fake = Fake::load();
            // One operation fails while a stream executes it, as after a stray access of a kernel.
            fake.fail_nth("work", n, ILLEGAL_ADDRESS);
            let runtime = builder(2, 1).open().unwrap();
            let model = runtime.open_model(&file.path).unwrap();
            let tensor = runtime.alloc(DType::U8, &[4, PAGE]).unwrap();
            let passes = (0..2)
                .chain(0..2)
                .try_for_each(|n| check(&runtime, &model, &file, n))
                .and_then(|()| write_and_check(&runtime, &tensor, 0));
            if let Err(error) = &passes {
                assert!(error.to_string().contains("ILLEGAL_ADDRESS"), "operation {n}: {error}");
                let again = check(&runtime, &model, &file, 0).unwrap_err();
                assert!(again.to_string().contains("ILLEGAL_ADDRESS"), "operation {n}: {again}");
            }
            drop((tensor, model));
            assert_eq!(runtime.close().is_err(), fake.fired() > 0, "operation {n}");
            only_pageable(&fake, &format!("operation {n}"));
            tell.send(fake.fired()).unwrap();
        });
        if told.recv().unwrap() == 0 {
            assert!(n > 10);
            break;
        }
    }
}

#[test]
fn closing_waits_for_what_is_in_flight() {
    let Some(fake) = Fake::load_or_skip("closing_waits_for_what_is_in_flight") else { return };
    closing_waits(|seed| fake.set_delay(3000, seed));
    fake.finish();
}

/// `before` is called with the number of each round.
fn closing_waits(before: impl Fn(u64)) {
    let file = synthetic(&[1 << 20; 12]);
    for seed in 0..5 {
        before(seed);
        let runtime = builder(5, 2).open().unwrap();
        let model = runtime.open_model(&file.path).unwrap();
        let tensors: Vec<Tensor> = (0..12).map(|n| model.tensor(&format!("t{n}")).unwrap()).collect();
        let written = [runtime.alloc(DType::U8, &[PAGE]).unwrap()];
        runtime.pin(&written).write().on_device().wait().unwrap().copy_in(0, 0, &[1; 1000]).unwrap();
        tensors.iter().for_each(|tensor| runtime.prefetch(tensor));
        let others = runtime.clone();
        std::thread::scope(|scope| {
            // These requests may end with "closed", but none may hang.
            scope.spawn(|| tensors.iter().for_each(|tensor| drop(others.pin(tensor).on_device().wait())));
            runtime.close().unwrap();
        });
        drop((tensors, model, written, others));
    }
}

const HOST_NUMA_ID: i32 = 134;

#[test]
fn host_memory_is_asked_for_near_the_gpu() {
    let Some(fake) = Fake::load_or_skip("host_memory_is_asked_for_near_the_gpu") else { return };
    let Ok(maps) = std::fs::read_to_string("/proc/self/numa_maps") else {
        eprintln!("SKIPPED host_memory_is_asked_for_near_the_gpu: the kernel has no /proc/self/numa_maps");
        return;
    };
    let preferred = |maps: &str| maps.lines().filter(|line| line.contains(" prefer")).count();
    let before = preferred(&maps);
    for (node, asked) in [(0, true), (-1, false), (5000, false)] {
        fake.set_attribute(HOST_NUMA_ID, node);
        let runtime = builder(2, 3).open().unwrap();
        let now = preferred(&std::fs::read_to_string("/proc/self/numa_maps").unwrap());
        assert_eq!(now > before, asked, "node {node}");
        assert_eq!(cuda_devices().unwrap()[0].numa_node, u32::try_from(node).ok());
        runtime.close().unwrap();
    }
    fake.finish();
}

/// A guard that is refused a copy after the close may be the runtime's last owner. When it is dropped, no thread may
/// still hold the device.
#[test]
fn regression_a_copy_after_the_close_leaves_no_thread_that_holds_the_device() {
    let Some(fake) = Fake::load_or_skip("regression_a_copy_after_the_close_leaves_no_thread_that_holds_the_device")
    else {
        return;
    };
    for round in 0..100 {
        let runtime = builder(1, 0).open().unwrap();
        let tensor = [runtime.alloc(DType::U8, &[100]).unwrap()];
        let mut guard = runtime.pin(&tensor).write().on_device().wait().unwrap();
        guard.copy_in(0, 0, &[1; 100]).unwrap();
        runtime.close().unwrap();
        assert_eq!(guard.copy_in(0, 0, &[2; 100]).unwrap_err().kind(), ErrorKind::Closed);
        assert_eq!(guard.copy_out(0, 0, &mut [0; 100]).unwrap_err().kind(), ErrorKind::Closed);
        drop((guard, tensor));
        assert_eq!(Fake::left(), 0, "round {round}: something of the device is still held");
    }
    fake.finish();
}

/// Ignores all completions.
struct Ignore;

impl Completions for Ignore {
    fn completed(&self, done: &mut Vec<Completion>) {
        done.clear();
    }
}

#[test]
fn a_closure_may_hold_the_last_owner_of_the_device() {
    let Some(fake) = Fake::load_or_skip("a_closure_may_hold_the_last_owner_of_the_device") else { return };
    a_closure_holds_the_last_owner();
    fake.finish();
}

fn a_closure_holds_the_last_owner() {
    let page_size = PageSize::new(Bytes::new(PAGE)).unwrap();
    let config = CudaDeviceConfig { device: CudaDeviceSelector::default(), page_size, frames: 2 };
    let sink = Arc::new(Ignore);
    let device = Arc::new(config.open(sink.clone()).unwrap());
    let stream = device.create_stream(StreamKind::Compute).unwrap();
    let (go, gone) = std::sync::mpsc::channel::<()>();
    let last = Arc::clone(&device);
    let call = StreamOp::Call(Box::new(move || {
        let _ = gone.recv();
        assert_eq!(last.close().unwrap_err().kind(), ErrorKind::InvalidArgument);
        drop(last);
    }));
    device.submit(stream, call, None);
    drop(device);
    go.send(()).unwrap();
    // The device's last thread gives everything back, its reference to the sink included.
    while Arc::strong_count(&sink) > 1 {
        std::thread::yield_now();
    }
}

/// The tests that need neither the emulated driver's judge nor its injected failures, on the machine's own driver.
mod cuda_real {
    use super::*;

    fn chosen(test: &str) -> bool {
        if !control::real_is_wanted() {
            eprintln!("SKIPPED {test}: OUTCORE_REAL_CUDA is not 1");
        }
        control::real_is_wanted()
    }

    macro_rules! on_a_gpu {
        ($($test:ident: $body:expr;)*) => {
            $(#[test] fn $test() {
                if chosen(stringify!($test)) {
                    watched(stringify!($test), || $body);
                }
            })*
        };
    }

    on_a_gpu! {
        gpus_are_listed: assert!(!cuda_devices().unwrap().is_empty());
        guards_that_would_give_slices_are_refused: slices_are_refused();
        a_model_larger_than_the_budget_streams_bit_for_bit: a_model_streams();
        read_write_tensors_go_to_disk_and_come_back: read_write_tensors();
        closing_waits_for_what_is_in_flight: closing_waits(|_| ());
        a_closure_may_hold_the_last_owner_of_the_device: a_closure_holds_the_last_owner();
        what_cannot_be_opened_says_why_and_what_to_do: refusals();
    }

    fn refusals() {
        let gpus = cuda_devices().unwrap();
        let missing = format!("cuda:{}", gpus.len());
        assert_eq!(refusal(builder(1, 0).device(gpu(&missing))).kind(), ErrorKind::NotFound);
        let small = PageSize::new(Bytes::kib(64)).unwrap();
        assert_eq!(refusal(builder(1, 0).page_size(small)).kind(), ErrorKind::InvalidArgument);
        let frames = gpus[0].memory.get() / PAGE + 1;
        assert_eq!(refusal(builder(frames, 0)).kind(), ErrorKind::OutOfMemory);
    }
}
