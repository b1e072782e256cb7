//! Choosing devices and budgets by name, and the errors for those that cannot be had. Nothing here loads the emulated
//! CUDA driver, so that a missing driver can be tested too.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::sync::Arc;

use outcore::device::{DeviceFactory, Host};
use outcore::{Bytes, DType, DeviceBudget, Error, ErrorKind, PageSize, Runtime, RuntimeBuilder};
use outcore_cuda::CudaDeviceSelector;
use outcore_testkit::sim::Simulated;

fn builder() -> RuntimeBuilder {
    Runtime::builder().page_size(PageSize::new(Bytes::kib(64)).unwrap()).device_budget(Bytes::mib(1))
}

fn assert_explained(error: &Error, kind: ErrorKind, says: &[&str], remedy: &[&str]) {
    assert_eq!(error.kind(), kind, "{error}");
    let (text, advice) = (error.to_string(), error.advice().unwrap_or_default());
    assert!(says.iter().all(|part| text.contains(part)), "{text:?} does not say {says:?}");
    assert!(remedy.iter().all(|part| advice.contains(part)), "{advice:?} does not say {remedy:?}");
}

#[test]
fn devices_have_names_that_can_be_read_back() {
    let uuid = "0f0e0d0c-0b0a-0908-0706-050403020100";
    let (gpu, mig) = (format!("GPU-{uuid}"), format!("MIG-{uuid}"));
    for text in ["0", "12", "0000:3b:00.0", &gpu, &mig] {
        let selector: CudaDeviceSelector = text.parse().unwrap();
        assert_eq!((selector.to_string(), selector.name()), (text.to_owned(), format!("cuda:{text}")));
        assert_eq!(selector.to_string().parse::<CudaDeviceSelector>().unwrap(), selector);
    }
    assert_eq!(CudaDeviceSelector::default(), "0".parse().unwrap());
    assert_eq!(mig.to_uppercase().parse::<CudaDeviceSelector>().unwrap(), mig.parse().unwrap());
    for wrong in ["", "gpu", "-1", "GPU-12", "MIG-GPU-1/2/3", "3b:00.0"] {
        let error = wrong.parse::<CudaDeviceSelector>().unwrap_err();
        assert_explained(&error, ErrorKind::InvalidArgument, &[wrong], &["PCI address"]);
    }
    assert_eq!((Host.name(), Simulated { seed: 7 }.name()), ("host".to_owned(), "sim:7".to_owned()));
}

#[test]
fn budgets_are_sizes_or_shares_of_what_is_free() {
    let gib = Bytes::gib;
    let budget = |text: &str| text.parse::<DeviceBudget>().unwrap();
    assert_eq!(budget("1.5GiB").of(Bytes::ZERO), Bytes::mib(1536));
    assert_eq!(budget("100%").of(gib(10)), gib(10));
    assert_eq!(budget("1%").of(Bytes::new(u64::MAX)), Bytes::new(u64::MAX / 100));
    assert_eq!(budget("50%-6GiB").of(gib(10)), gib(4));
    assert_eq!(budget("50%-1GiB").of(gib(10)), gib(5));
    assert_eq!(budget("50%-20GiB").of(gib(10)), Bytes::ZERO);
    assert_eq!(budget("90%-1GiB").to_string(), "90% of what is free, but for 1.0 GiB");
    for wrong in ["0%", "101%", "-5%", "%", "90%+1GiB", "90%-", "90%-x", "5.5%", "90% of"] {
        let error = wrong.parse::<DeviceBudget>().unwrap_err();
        assert_explained(&error, ErrorKind::InvalidArgument, &[wrong], &["90%-1GiB"]);
    }
}

#[test]
fn a_share_of_what_is_free_is_what_the_runtime_has() {
    let devices: [Arc<dyn DeviceFactory>; 2] = [Arc::new(Host), Arc::new(Simulated::default())];
    for device in devices {
        // Free memory changes all the time, so the budget is only checked against bounds.
        let runtime =
            builder().device(device.clone()).device_budget("1%".parse::<DeviceBudget>().unwrap()).open().unwrap();
        let budget = runtime.stats().device.budget;
        let limit = outcore::machine::MemoryLimit::detect().unwrap().limit;
        assert!(budget >= Bytes::kib(64) && budget.get() <= limit.get() / 100, "{budget} of {limit}");
        let tensor = [runtime.alloc(DType::U8, &[1000]).unwrap()];
        runtime.pin(&tensor).write().on_device().wait().unwrap().copy_in(0, 0, &[1; 1000]).unwrap();
        drop(tensor);
        runtime.close().unwrap();
        let nothing: DeviceBudget = "1%-1000TiB".parse().unwrap();
        let error = builder().device(device).device_budget(nothing).open().unwrap_err();
        let says = ["1% of what is free, but for 1000.0 TiB", "which is 0 B", "64.0 KiB"];
        assert_explained(&error, ErrorKind::BudgetTooSmall, &says, &["at least 64.0 KiB"]);
    }
}

/// Skipped where there is a driver.
#[test]
fn a_machine_without_a_driver_says_so() {
    if let Ok(found) = outcore_cuda::cuda_devices() {
        eprintln!("SKIPPED a_machine_without_a_driver_says_so: there is one, with {} GPUs", found.len());
        return;
    }
    let error = builder().device(CudaDeviceSelector::default()).open().unwrap_err();
    if error.kind() != ErrorKind::Unsupported || !error.to_string().contains("libcuda") {
        // There is a driver, but no GPU.
        assert_explained(&error, error.kind(), &["open the device cuda:0"], &[""]);
        eprintln!("SKIPPED a_machine_without_a_driver_says_so: {error}");
        return;
    }
    let says = ["open the device cuda:0", "there is no CUDA driver here", "libcuda.so.1"];
    assert_explained(&error, ErrorKind::Unsupported, &says, &["NVIDIA driver", "host device"]);
    builder().open().unwrap().close().unwrap();
}
