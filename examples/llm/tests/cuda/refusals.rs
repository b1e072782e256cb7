//! What is refused for want of a GPU, a driver, kernels or memory that suit, and a GPU that is lost: each error says
//! the cause and the remedy in a sentence, and nothing hangs.

use outcore::{DType, Error as Outcore, ErrorKind, PageSize, PolicyKind};
use outcore_kv::{KvPool, TenantId};
use outcore_llm::{Error, PagedKeys, Result, paged_kv};

use super::*;

/// Codes of the driver.
const NO_BINARY_FOR_GPU: u32 = 209;
const UNSUPPORTED_PTX_VERSION: u32 = 222;
const ILLEGAL_ADDRESS: u32 = 700;
/// Attributes of a device: the two numbers of its compute capability.
const MAJOR: i32 = 75;
const MINOR: i32 = 76;

/// Fails unless the error is of outcore, of this kind, and says all of `wanted` in its message or its remedy.
fn refused<T>(what: &str, got: Result<T>, kind: ErrorKind, wanted: &[&str]) {
    let Err(error) = got else { panic!("{what} is not refused") };
    let Error::Outcore(error) = error else { panic!("{what}: {error}") };
    refused_by_outcore(what, &error, kind, wanted);
}

fn refused_by_outcore(what: &str, error: &Outcore, kind: ErrorKind, wanted: &[&str]) {
    let text = error.to_string();
    assert_eq!(error.kind(), kind, "{what}: {text}");
    assert!(error.advice().is_some(), "{what}: what to do about it? {text}");
    assert!(wanted.iter().all(|part| text.contains(part)), "{what}: wanted {wanted:?}: {text}");
}

#[test]
fn a_gpu_or_a_driver_that_is_too_old_is_refused() {
    let Some(driver) = driver("a_gpu_or_a_driver_that_is_too_old_is_refused") else { return };
    let Some(fake) = &driver.fake else { return };
    let open = || Gpu::open(&driver.device, driver.kernels.as_deref());
    for (major, minor) in [(7, 5), (6, 1), (3, 7)] {
        fake.set_attribute(MAJOR, major);
        fake.set_attribute(MINOR, minor);
        let capability = format!("capability {major}.{minor}");
        refused(&capability, open(), ErrorKind::Unsupported, &[&capability, "need 8.0", "--device host"]);
    }
    fake.set_attribute(MAJOR, 8);
    fake.set_attribute(MINOR, 0);
    drop(open().unwrap());
    fake.set_driver_version(11_080);
    refused("a driver", open(), ErrorKind::Unsupported, &["11.8", "12.0"]);
    driver.finish();
}

#[test]
fn kernels_that_do_not_suit_the_gpu_are_refused() {
    let Some(driver) = driver("kernels_that_do_not_suit_the_gpu_are_refused") else { return };
    let Some(fake) = &driver.fake else { return };
    fake.fail_nth("cuModuleLoadData", 1, NO_BINARY_FOR_GPU);
    let of_another = Gpu::open(&driver.device, driver.kernels.as_deref());
    let wanted = ["do not suit this GPU", "NO_BINARY_FOR_GPU", "check_kernels.sh", "--kernels FILE"];
    refused("of another architecture", of_another, ErrorKind::Unsupported, &wanted);
    // Without a file: NVRTC's where it is installed, else those in the program.
    fake.fail_nth("cuModuleLoadData", 1, NO_BINARY_FOR_GPU);
    let own = Gpu::open(&driver.device, None);
    refused("of the program", own, ErrorKind::Unsupported, &wanted);
    fake.fail_nth("cuModuleLoadData", 1, UNSUPPORTED_PTX_VERSION);
    let newer = Gpu::open(&driver.device, None);
    refused("of a newer driver", newer, ErrorKind::Unsupported, &["the driver is older than", "update the driver"]);
    driver.finish();
}

#[test]
fn a_budget_larger_than_what_is_free_is_refused() {
    let Some(driver) = driver("a_budget_larger_than_what_is_free_is_refused") else { return };
    if driver.fake.is_none() {
        return;
    }
    let open = Runtime::builder().device(driver.device.clone()).device_budget(Bytes::gib(64)).open();
    let Err(error) = open else { panic!("64 GiB of 4 are not refused") };
    refused_by_outcore("the budget", &error, ErrorKind::OutOfMemory, &["64.0 GiB"]);
    // The runtime leaves too little for a session.
    let folder = tempfile::tempdir().unwrap();
    let files = gguf(folder.path(), &Spec { context: 1 << 22, ..spec(Arch::Llama, WeightType::Q8_0) });
    let runtime = Runtime::builder().device(driver.device.clone()).device_budget(Bytes::gib(1)).open().unwrap();
    {
        let model = runtime.open_parsed(files.header().clone()).unwrap();
        let weights = Arc::new(PagedWeights::open(&runtime, &model, &files).unwrap());
        let model = Arc::new(CudaModel::load(&files, weights, Arc::new(gpu(&driver))).unwrap());
        let session = CudaSession::new(model, 1 << 22, 64, KvType::F32);
        refused(
            "a session",
            session,
            ErrorKind::OutOfMemory,
            &["GPU memory for one sequence", "smaller device budget"],
        );
    }
    runtime.close().unwrap();
    driver.finish();
}

/// By name, before a weight is read.
#[test]
fn weights_of_types_without_kernels_are_refused() {
    let Some(driver) = driver("weights_of_types_without_kernels_are_refused") else { return };
    if driver.fake.is_none() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let without: Vec<WeightType> = WeightType::ALL.into_iter().filter(|t| !ON_GPU.contains(t)).collect();
    assert_eq!(without, [WeightType::IQ4_NL, WeightType::IQ4_XS, WeightType::MXFP4]);
    for dtype in without {
        let files = gguf(folder.path(), &Spec { layers: 1, ..spec(Arch::Llama, dtype) });
        let runtime = Runtime::builder().device(driver.device.clone()).device_budget(Bytes::new(6 * PAGE)).open();
        let runtime = runtime.unwrap();
        let model = runtime.open_parsed(files.header().clone()).unwrap();
        let weights = Arc::new(PagedWeights::open(&runtime, &model, &files).unwrap());
        drop(model);
        let Err(error) = CudaModel::load(&files, weights, Arc::new(gpu(&driver))) else {
            panic!("{dtype} is not refused")
        };
        runtime.close().unwrap();
        let text = error.to_string();
        assert!(matches!(error, Error::Unsupported(_)), "{dtype}: {text}");
        let wanted = [".gguf: tensor \"", &format!("has type {dtype}"), "--device host", "one of F32, F16, BF16, Q4_0"];
        assert!(wanted.iter().all(|part| text.contains(part)), "{dtype}: wanted {wanted:?}: {text}");
    }
    driver.finish();
}

/// Whatever is the matter with the library, own kernels multiply.
#[test]
fn a_cublaslt_that_refuses_is_done_without() {
    let Some((driver, library)) = with_library("a_cublaslt_that_refuses_is_done_without") else { return };
    let Some(library) = library else { return };
    let folder = tempfile::tempdir().unwrap();
    let files = gguf(folder.path(), &spec(Arch::Llama, WeightType::F16));
    let prompted = |gpu: Gpu| on(&driver, gpu, &files, 64, |session| session.forward(&prompt()).unwrap().to_vec());
    let want = prompted(gpu(&driver).without_cublaslt());
    library.refuse(1);
    let without_handle = prompted(gpu(&driver));
    assert!(without_handle == want, "a handle that cannot be made changes bits");
    // What is done for the library before each product, such as a norm, has kernels of its own, which round otherwise.
    library.refuse(2);
    assert_near("no algorithm", &prompted(gpu(&driver)), &want, 1e-5);
    assert_eq!(library.products(), 0);
    library.refuse(3);
    on(&driver, gpu(&driver), &files, 64, |session| {
        let wanted = ["cuBLASLt cannot multiply", "EXECUTION_FAILED", "LD_LIBRARY_PATH"];
        refused("a product", session.forward(&prompt()).map(drop), ErrorKind::Device, &wanted);
        assert!(session.is_empty());
        library.refuse(0);
        assert_near("after a failure", session.forward(&prompt()).unwrap(), &want, 2e-3);
    });
    finish(&driver, Some(library));
}

/// The error of the pass names the cause, and that of `close` what was only in the GPU's memory.
#[test]
fn a_gpu_that_is_lost_in_a_pass_is_named_and_so_is_what_is_lost() {
    let Some(driver) = driver("a_gpu_that_is_lost_in_a_pass_is_named_and_so_is_what_is_lost") else { return };
    let Some(fake) = &driver.fake else { return };
    let folder = tempfile::tempdir().unwrap();
    // Rows of which a block fills pages.
    let files = gguf(folder.path(), &Spec { kv_heads: 4, ..spec(Arch::Llama, WeightType::F32) });
    let builder = Runtime::builder().device(driver.device.clone()).policy(PolicyKind::Kv);
    fake.set_granularity(4096);
    let builder = builder.page_size(PageSize::new(Bytes::kib(64)).unwrap());
    let runtime = builder.device_budget(Bytes::mib(16)).open().unwrap();
    {
        let model = runtime.open_parsed(files.header().clone()).unwrap();
        let weights = Arc::new(PagedWeights::open(&runtime, &model, &files).unwrap());
        let model = Arc::new(CudaModel::load(&files, weights, Arc::new(gpu(&driver))).unwrap());
        let layout = paged_kv::layout(model.config(), &runtime, 1 << 20).unwrap();
        let pool = KvPool::open(&runtime, layout, b"synthetic", 40).unwrap();
        let keys = PagedKeys::new(pool.begin(TenantId::new(1), &[]).unwrap());
        let mut session = CudaSession::paged(model, keys, 64).unwrap();
        // Its keys and values are nowhere else.
        session.forward(&prompt()).unwrap();
        let other = runtime.alloc(DType::U8, &[1 << 16]).unwrap();
        fake.lose_at("cuLaunchKernel", 5, ILLEGAL_ADDRESS);
        let wanted = ["ILLEGAL_ADDRESS", "start the program again"];
        refused("a pass", session.forward(&[1, 2, 3]).map(drop), ErrorKind::Device, &wanted);
        // The runtime notices when it next asks the GPU for something. Blocks that are dropped before are not lost.
        assert!(runtime.pin(&other).write().on_device().wait().is_err());
        assert!(!runtime.health().is_empty(), "nothing is said to be lost");
    }
    let Err(error) = runtime.close() else { panic!("nothing is said to be lost") };
    refused_by_outcore("close", &error, ErrorKind::Device, &["lost (", "of a read-write tensor", "ILLEGAL_ADDRESS"]);
    assert!(error.to_string().contains(&DType::U8.to_string()), "{error}");
    // A lost device cannot be asked to give things back.
    fake.take_findings();
}
