//! What a token takes of the host's processor, beside what it takes where every weight is pinned by itself and every
//! step of the formulas is a launch of its own: processor times of one thread, in one run.

use std::time::Duration;

use cudarc::driver::{CudaContext, CudaFunction, CudaStream, LaunchConfig, PushKernelArg, result};
use cudarc::nvrtc::Ptx;
use outcore::device::RawStream;
use outcore::{ComputeStream, Tensor};

use super::*;

const TOKENS: u32 = 40;

/// The shape of SmolLM2-135M.
fn shape() -> Spec {
    Spec {
        arch: Arch::Llama,
        dtype: WeightType::Q8_0,
        layers: 30,
        dim: 576,
        heads: 9,
        kv_heads: 3,
        head_dim: 64,
        ffn_dim: 1536,
        vocab: 49152,
        context: 2048,
        tied: true,
        seed: 1,
        experts: None,
        window: 20,
    }
}

/// Processor time of this thread.
fn thread_time() -> Duration {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the clock exists on every Linux, and `time` is a timespec.
    assert_eq!(unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &raw mut time) }, 0);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

/// One launch for each step of the formulas, one pin for each weight: 16 launches and 9 pins a layer.
struct Before {
    runtime: Runtime,
    stream: Arc<CudaStream>,
    adopted: ComputeStream,
    /// Of the layers: two norms and seven matrices each.
    weights: Vec<Tensor>,
    /// The last norm, and the embeddings.
    others: [Tensor; 2],
    kernel: CudaFunction,
    layers: u64,
}

impl Before {
    /// A launch with as many parameters as they had on average. What they mean is of no account: nothing runs.
    fn launch(&self) {
        let (address, word) = (0_u64, 1_u64);
        let mut launch = self.stream.launch_builder(&self.kernel);
        launch.arg(&address).arg(&address).arg(&word);
        let config = LaunchConfig { grid_dim: (1, 1, 1), block_dim: (256, 1, 1), shared_mem_bytes: 0 };
        // SAFETY: the emulated driver runs no kernel while it is bare.
        unsafe { launch.launch(config) }.unwrap();
    }

    /// A step that uses a weight: pins it for the stream, and launches.
    fn with(&self, weight: &Tensor, launches: u32) {
        let pin = self.runtime.pin(weight).on(&self.adopted).wait().unwrap();
        (0..launches).for_each(|_| self.launch());
        drop(pin);
    }

    fn token(&self, logits: &mut [f32], chosen: &mut [u32], from: u64) {
        self.with(&self.others[1], 1);
        for layer in self.weights.chunks(self.weights.len() / self.layers as usize) {
            let [norm, q, k, v, out, ffn_norm, gate, up, down] = layer else { panic!("{layer:?}") };
            // The numbers of the norm, and the norm.
            self.with(norm, 1);
            self.launch();
            [q, k, v].iter().for_each(|weight| self.with(weight, 1));
            // Two rotations, keys and values, attention.
            (0..4).for_each(|_| self.launch());
            self.with(out, 1);
            self.with(ffn_norm, 1);
            self.launch();
            [gate, up].iter().for_each(|weight| self.with(weight, 1));
            self.launch();
            self.with(down, 1);
        }
        self.with(&self.others[0], 1);
        self.launch();
        self.with(&self.others[1], 1);
        let stream = self.stream.cu_stream();
        // SAFETY: nothing is copied while the emulated driver is bare.
        unsafe { result::memcpy_dtoh_async(logits, from, stream) }.unwrap();
        self.stream.synchronize().unwrap();
        self.launch();
        // SAFETY: as above.
        unsafe { result::memcpy_dtoh_async(chosen, from, stream) }.unwrap();
        self.stream.synchronize().unwrap();
    }
}

#[test]
fn what_a_token_takes_of_the_host() {
    let Some(driver) = driver("what_a_token_takes_of_the_host") else { return };
    let Some(fake) = &driver.fake else { return };
    let folder = tempfile::tempdir().unwrap();
    let spec = shape();
    let files = gguf(folder.path(), &spec);
    fake.set_bare(true);
    let bytes = files.header().files.iter().map(|file| file.len).sum::<u64>() + 8 * PAGE;
    let runtime = Runtime::builder().device(driver.device.clone()).device_budget(Bytes::new(bytes)).open().unwrap();
    {
        let opened = runtime.open_parsed(files.header().clone()).unwrap();
        // Before.
        let context = CudaContext::new(0).unwrap();
        // SAFETY: there is one stream here.
        unsafe { context.disable_event_tracking() };
        let stream = context.new_stream().unwrap();
        let module = context.load_module(Ptx::from_file(driver.kernels.clone().unwrap())).unwrap();
        // SAFETY: the stream outlives the adopted one.
        let adopted = unsafe { runtime.adopt_stream(RawStream::new(stream.cu_stream().cast())) }.unwrap();
        let stems =
            ["attn_norm", "attn_q", "attn_k", "attn_v", "attn_output", "ffn_norm", "ffn_gate", "ffn_up", "ffn_down"];
        let name = |layer: u64, stem: &str| format!("blk.{layer}.{stem}.weight");
        let names = (0..spec.layers).flat_map(|layer| stems.map(|stem| name(layer, stem)));
        let weights: Vec<Tensor> = names.map(|name| opened.tensor(&name).unwrap()).collect();
        let others = ["output_norm.weight", "token_embd.weight"].map(|name| opened.tensor(name).unwrap());
        let kernel = module.load_function("silu_multiply").unwrap();
        let before = Before { runtime: runtime.clone(), stream, adopted, weights, others, kernel, layers: spec.layers };
        // SAFETY: locked memory that nobody else has; it is written before it is read.
        let mut logits = unsafe { context.alloc_pinned::<f32>(spec.vocab as usize) }.unwrap();
        // SAFETY: as above.
        let mut chosen = unsafe { context.alloc_pinned::<u32>(1) }.unwrap();
        let device = context.default_stream().alloc_zeros::<f32>(spec.vocab as usize).unwrap();
        let from = cudarc::driver::DevicePtr::device_ptr(&device, &before.stream).0;
        let (logits, chosen) = (logits.as_mut_slice().unwrap(), chosen.as_mut_slice().unwrap());
        before.token(logits, chosen, from);
        let since = thread_time();
        (0..TOKENS).for_each(|_| before.token(logits, chosen, from));
        let old = (thread_time() - since) / TOKENS;
        drop((before, device, module, context));

        // Now, with graphs and without.
        let weights = Arc::new(PagedWeights::open(&runtime, &opened, &files).unwrap());
        let gpu = Arc::new(own_kernels(&driver).unwrap());
        let model = Arc::new(CudaModel::load(&files, weights, gpu).unwrap());
        let now = |graphs: bool| {
            let mut session = CudaSession::new(model.clone(), 600, 64, KvType::F16).unwrap();
            session.use_graphs(graphs);
            let mut sampler = Sampler::greedy();
            for _ in 0..4 {
                session.next(&[1], &mut sampler).unwrap();
            }
            let (since, before) = (thread_time(), session.counts());
            for _ in 0..TOKENS {
                session.next(&[1], &mut sampler).unwrap();
            }
            let counts = session.counts() - before;
            ((thread_time() - since) / TOKENS, counts)
        };
        let ((graphs, counts), (launches, counts_without)) = (now(true), now(false));
        println!("host a token, one pin a weight and one launch a step: {old:?}");
        println!("host a token, launches: {launches:?}, {counts_without:?} in {TOKENS} tokens");
        println!("host a token, graphs: {graphs:?}, {counts:?} in {TOKENS} tokens");
        println!("ratio: {:.4}", graphs.as_secs_f64() / old.as_secs_f64());
        // Both are processor time of this thread, in one run.
        assert!(graphs * 4 <= old, "a token of graphs takes {graphs:?} of the host, one of launches {old:?}");
    }
    runtime.close().unwrap();
    driver.finish();
}
