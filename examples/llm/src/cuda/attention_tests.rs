//! Attention by products against own kernels and sums in f64, over the emulated driver and a cuBLASLt on the CPU, or a
//! GPU with its own.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::sync::Arc;

use outcore::{Bytes, PageSize, PolicyKind, Runtime};
use outcore_kv::{KvPool, TenantId};

use super::super::gpu::Gpu;
use super::super::kernels::Turn;
use super::super::prompt::Prompts;
use super::super::prompt::tests::cublaslt::{driver_with_library, finish, no_library};
use super::super::prompt::tests::{near, with_library};
use super::super::room::TILE_POSITIONS;
use super::super::tests::{Blocks, Memory, Shape, attended, get, kept_as, numbers, once, put, room};
use super::super::{CudaModel, CudaSession};
use super::*;
use crate::arch::Arch;
use crate::config::RopePairs;
use crate::dtype::{KvType, WeightType};
use crate::files::ModelFiles;
use crate::paged::PagedWeights;
use crate::paged_kv::{self, PagedKeys};
use crate::synthetic::Spec;

/// What f16 queries, keys, values and shares may change of a result, relative to its length.
const TOLERANCE: f64 = 1e-3;

/// A prompt's queries, and the keys and values up to the last of them.
struct Case {
    shape: Shape,
    q: Vec<f32>,
    keys: Vec<f32>,
    values: Vec<f32>,
    blocks: Blocks,
    /// Positions, and the sequence of each vector.
    at: Memory<u32>,
    of: Memory<u32>,
    queries: Memory<f32>,
    kept: Memory<f32>,
    room: Room,
    _memory: Memory<u8>,
}

impl Case {
    /// In blocks of `each` tokens, tiles of 128 positions and `vectors` vectors.
    fn new(gpu: &Gpu, element: Element, shape: Shape, each: usize, vectors: usize) -> Self {
        let Shape { heads, kv_heads, head_dim, past, m } = shape;
        let (len, row, pass) = (past + m, kv_heads * head_dim, m * heads * head_dim);
        // Scores grow and shrink from tile to tile, and no two vectors are of one size.
        let sizes = |n: usize| 1.0 + (n / head_dim % 5) as f32;
        let q: Vec<f32> = numbers(pass, 7).into_iter().enumerate().map(|(n, x)| x * sizes(n)).collect();
        let [keys, values] = [8, 9].map(|seed| kept_as(element, &numbers(len * row, seed)));
        let blocks = Blocks::new(gpu, element, [kv_heads, head_dim], each, len.div_ceil(each));
        let (all, second) = (put(gpu, &(0..len as u32).collect::<Vec<_>>()), put(gpu, &vec![1u32; len]));
        let (queries, k, v) = (put(gpu, &q), put(gpu, &keys), put(gpu, &values));
        // No head of queries, so only keys and values are stored; without rotation, as they are.
        let turn = Turn {
            q: queries.address,
            k: k.address,
            v: v.address,
            heads: 0,
            q_norm: None,
            k_norm: None,
            frequencies: queries.address,
            pairs: 0,
            kind: RopePairs::Halves,
        };
        gpu.kernels.turn(&turn, &blocks.cached(len, &all, Some(&second))).unwrap();
        let mut end = 0u64;
        let mut place = |bytes: usize| {
            let start = end;
            end += (bytes as u64).next_multiple_of(256);
            start
        };
        let (positions, tile_bytes) = (PART as usize, 4 * heads * PART as usize * vectors);
        let places = Room {
            tile: place(tile_bytes),
            tile_bytes: tile_bytes as u64,
            halves: place(2 * pass),
            scales: place(4 * m),
            products: place(4 * pass),
            keys: place(2 * positions * row),
            values: place(2 * positions * row),
            positions: PART,
            workspace: super::super::gemm::Workspace { address: place(1 << 16), bytes: 1 << 16 },
        };
        // What nobody wrote is NaN in either type.
        let memory = put(gpu, &vec![0xffu8; end as usize]);
        let at = put(gpu, &(past as u32..len as u32).collect::<Vec<_>>());
        let (of, kept) = (put(gpu, &vec![1u32; m]), put(gpu, &vec![f32::NAN; m * heads * 2]));
        let room = places.at(memory.address);
        Self { shape, q, keys, values, blocks, at, of, queries, kept, room, _memory: memory }
    }

    /// Calls `launch` for waves of parts, and returns the results.
    fn run(
        &self,
        gpu: &Gpu,
        waves: impl IntoIterator<Item = Range<u32>>,
        mut launch: impl FnMut(&Queries, &Cached, Range<u32>),
    ) -> Vec<f32> {
        let (heads, m) = (self.shape.heads, self.shape.m);
        let out = room::<f32>(gpu, m * heads * self.shape.head_dim);
        let q = Queries {
            q: self.queries.address,
            out: out.address,
            heads: heads as u32,
            kept: self.kept.address,
            parts: self.parts(),
        };
        let to = self.blocks.cached(m, &self.at, Some(&self.of));
        for wave in waves {
            launch(&q, &to, wave);
        }
        get(gpu, &out)
    }

    fn parts(&self) -> u32 {
        ((self.shape.past + self.shape.m) as u32).div_ceil(PART)
    }

    fn attend(&self, on: &Kernels, prompts: &Prompts, q: &Queries, to: &Cached, parts: Range<u32>) -> Result<bool> {
        prompts.attend(on, &self.room, q, to, self.shape.past as u32, parts)
    }

    fn by_products(&self, gpu: &Gpu, waves: impl IntoIterator<Item = Range<u32>>) -> Vec<f32> {
        let prompts = gpu.prompts.as_ref().unwrap();
        self.run(gpu, waves, |q, to, parts| {
            assert!(self.attend(&gpu.kernels, prompts, q, to, parts).unwrap());
        })
    }

    fn by_own_kernels(&self, gpu: &Gpu) -> Vec<f32> {
        let all = std::iter::once(0..self.parts());
        self.run(gpu, all, |q, to, parts| gpu.kernels.attend_prompt(q, to, parts).unwrap())
    }
}

const fn shape(heads: usize, kv_heads: usize, head_dim: usize, past: usize, m: usize) -> Shape {
    Shape { heads, kv_heads, head_dim, past, m }
}

/// Heads of every size, alone and in groups; keys and values of both types, in blocks of any length; tiles of a few
/// vectors, and of positions that some of these do not see.
#[test]
pub(in super::super) fn products_give_the_attention_of_own_kernels() {
    with_library("products_give_the_attention_of_own_kernels", |gpu, library| {
        let cases = [
            (Element::F16, shape(4, 1, 64, 0, 19), 7, 8),
            (Element::F32, shape(6, 2, 80, 133, 9), 11, 16),
            (Element::F16, shape(8, 1, 128, 250, 10), 512, 10),
            (Element::F32, shape(2, 2, 256, 121, 12), 5, 3),
            (Element::F16, shape(2, 2, 64, 3, 9), 16, 1),
        ];
        for (element, shape, each, vectors) in cases {
            let what = format!(
                "attention, {element:?}, {} heads of {} for {}, {} vectors at {}",
                shape.heads, shape.head_dim, shape.kv_heads, shape.m, shape.past
            );
            let case = Case::new(gpu, element, shape, each, vectors);
            let parts: Vec<Range<u32>> = (0..case.parts()).map(|part| part..part + 1).collect();
            if let Some(library) = library {
                // Of the case before.
                library.products();
                library.batches();
            }
            let before = gpu.kernels.launched();
            let whole = std::iter::once(0..case.parts());
            let got = case.by_products(gpu, whole);
            let launched = gpu.kernels.launched() - before;
            if let Some(library) = library {
                let (products, batches) = (library.products(), library.batches());
                assert_eq!(batches, products * case.shape.kv_heads as u64, "{what}: a product of all heads");
                let tiles = case.shape.m.div_ceil(vectors) as u64;
                assert!(products <= 2 * tiles * parts.len() as u64, "{what}: {products} products");
                assert!(launched <= 2 + parts.len() as u64 * (1 + tiles), "{what}: {launched} launches");
            }
            // With tiles of a part, waves of a part each have the same ones.
            assert_eq!(case.by_products(gpu, parts.clone()), got, "{what}: waves");
            let own: Vec<f64> = case.by_own_kernels(gpu).into_iter().map(f64::from).collect();
            near(&format!("{what}, own kernels"), &got, &own, TOLERANCE);
            let exact = attended(&case.shape, &case.q, &case.keys, &case.values);
            let exact: Vec<f64> = exact.into_iter().map(f64::from).collect();
            near(&what, &got, &exact, TOLERANCE);
        }
    });
}

/// Queries that no f16 could be, and that make one position's share all there is.
#[test]
fn queries_of_any_size_have_products() {
    with_library("queries_of_any_size_have_products", |gpu, _| {
        let mut case = Case::new(gpu, Element::F32, shape(4, 2, 64, 0, 9), 16, 9);
        for (j, size) in [(1, 1e-9), (2, 0.0), (3, 1e7), (5, 1e-4), (6, 300.0)] {
            case.q[j * 256..(j + 1) * 256].iter_mut().for_each(|x| *x *= size);
        }
        case.queries = put(gpu, &case.q);
        let got = case.by_products(gpu, std::iter::once(0..1));
        let want: Vec<f64> = case.by_own_kernels(gpu).into_iter().map(f64::from).collect();
        for (j, (got, want)) in got.chunks(256).zip(want.chunks(256)).enumerate() {
            // Of large queries, the last bits of a score decide about shares.
            near(&format!("attention, vector {j}"), got, want, if j == 6 { 5e-2 } else { TOLERANCE });
        }
    });
}

/// Whether it says so when asked, or only when it is to multiply.
#[test]
fn what_the_library_refuses_own_kernels_attend() {
    with_library("what_the_library_refuses_own_kernels_attend", |gpu, library| {
        let Some(library) = library else { return };
        let case = Case::new(gpu, Element::F16, shape(4, 2, 64, 121, 11), 16, 4);
        let want = case.by_own_kernels(gpu);
        for what in [4, 5] {
            let prompts = always(gpu);
            library.refuse(what);
            let got = case.run(gpu, std::iter::once(0..2), |q, to, parts| {
                assert!(!case.attend(&gpu.kernels, &prompts, q, to, parts.clone()).unwrap());
                gpu.kernels.attend_prompt(q, to, parts).unwrap();
            });
            library.refuse(0);
            assert!(got == want, "{what}: own kernels begin with what the library left");
            assert_eq!(library.products(), 0, "{what}");
        }
        // Behind the first wave, own kernels cannot begin any more.
        let prompts = always(gpu);
        case.run(gpu, [0..1, 1..2], |q, to, parts| {
            library.refuse(if parts.start == 0 { 0 } else { 5 });
            let done = case.attend(&gpu.kernels, &prompts, q, to, parts.clone());
            library.refuse(0);
            match done {
                Ok(done) => assert!(done && parts.start == 0),
                Err(error) => assert!(parts.start > 0 && error.to_string().contains("has begun"), "{error}"),
            }
        });
    });
}

/// The library as it is when it computes the attention of every prompt, however short.
fn always(gpu: &Gpu) -> Prompts {
    let mut prompts = Prompts::open(&gpu.kernels, &gpu.stream).unwrap().unwrap();
    prompts.attention.work_of_a_launch = 0;
    prompts
}

/// Launches take their time, whatever they have to do.
#[test]
fn the_library_gets_what_is_worth_its_launches() {
    with_library("the_library_gets_what_is_worth_its_launches", |gpu, _| {
        let case = Case::new(gpu, Element::F16, shape(1, 1, 64, 0, 1), 16, 1);
        let room = Room { positions: TILE_POSITIONS, tile_bytes: 16 << 20, ..case.room };
        let worth = |[heads, kv_heads, head_dim]: [u32; 3], past: u32, m: u32| {
            let to = Cached { heads: kv_heads, head_dim, m, ..case.blocks.cached(1, &case.at, None) };
            let q = Queries { q: 0, out: 0, heads, kept: 0, parts: 0 };
            Pass::new(&room, &q, &to, past).unwrap().is_worth(WORK_OF_A_LAUNCH)
        };
        // Models of 8e9, 1e9 and 135e6 weights; prompts that begin a context, and one that goes on with a long one.
        for (shape, past, short, long) in [
            ([32, 8, 128], 0, 128, 256),
            ([32, 8, 64], 0, 256, 512),
            ([9, 3, 64], 0, 256, 1024),
            ([32, 8, 128], 8192, 16, 64),
        ] {
            assert!(!worth(shape, past, short), "{short} vectors at {past}, {shape:?}");
            // What own kernels multiply with weights, they attend to, however long the context is.
            assert!(!worth([256, 8, 128], 1 << 20, FEW as u32), "few vectors");
            assert!(worth([256, 8, 128], 1 << 20, FEW as u32 + 1), "one more");
            assert!((long..8192).step_by(61).all(|m| worth(shape, past, m)), "{long} vectors at {past}, {shape:?}");
        }
    });
}

/// A model whose pages have blocks of 32 tokens.
fn spec() -> Spec {
    Spec {
        arch: Arch::Llama,
        dtype: WeightType::F16,
        layers: 2,
        dim: 64,
        heads: 4,
        kv_heads: 2,
        head_dim: 32,
        ffn_dim: 64,
        vocab: 100,
        context: 4096,
        tied: false,
        seed: 7,
        experts: None,
        window: 20,
    }
}

/// Prompts in one pass and in several, and in waves: with the library for products alone, for attention too, and not at
/// all.
#[test]
fn logits_are_the_same_by_products_and_by_own_kernels() {
    once("logits_are_the_same_by_products_and_by_own_kernels", || {
        let test = "logits_are_the_same_by_products_and_by_own_kernels";
        let Some((driver, library)) = driver_with_library(test) else { return };
        let open = || Gpu::open(&driver.device, driver.kernels.as_deref()).unwrap();
        if !open().has_cublaslt() {
            return no_library(test);
        }
        let page = match &driver.fake {
            Some(fake) => {
                fake.set_granularity(4096);
                Bytes::kib(16)
            }
            None => Bytes::mib(2),
        };
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("model.gguf");
        spec().write_gguf(&path).unwrap();
        let files = ModelFiles::open(path).unwrap();
        let prompt: Vec<u32> = (0..150).map(|n| (n * n * 7 + 3) % 100).collect();
        let logits = |gpu: Gpu, kv: Option<KvType>, pass: usize, frames: u64| {
            let builder = Runtime::builder().device(driver.device.clone()).policy(PolicyKind::Kv);
            let builder = builder.page_size(PageSize::new(page).unwrap());
            let runtime = builder.device_budget(Bytes::new(frames * page.get())).open().unwrap();
            let found = {
                let model = runtime.open_parsed(files.header().clone()).unwrap();
                let weights = Arc::new(PagedWeights::open(&runtime, &model, &files).unwrap());
                let model = Arc::new(CudaModel::load(&files, weights, Arc::new(gpu)).unwrap());
                let layout = paged_kv::layout(model.config(), &runtime, 1 << 20).unwrap();
                let pool = KvPool::open(&runtime, layout, b"", 20).unwrap();
                let mut session = match kv {
                    Some(kv) => CudaSession::new(model, 200, pass, kv).unwrap(),
                    None => {
                        let keys = PagedKeys::new(pool.begin(TenantId::new(1), &[]).unwrap());
                        CudaSession::paged(model, keys, pass).unwrap()
                    }
                };
                session.forward(&prompt).unwrap().to_vec()
            };
            runtime.close().unwrap();
            found
        };
        let counts = || library.map(|library| (library.products(), library.batches()));
        // Of other tests.
        counts();
        let want = logits(open().without_cublaslt(), Some(KvType::F32), prompt.len(), 64);
        let want: Vec<f64> = want.into_iter().map(f64::from).collect();
        assert_eq!(counts().unwrap_or((0, 0)), (0, 0), "the library multiplied where it must not");
        // As it is, a prompt as short as this is not worth the launches.
        logits(open(), Some(KvType::F32), prompt.len(), 64);
        if let Some((products, batches)) = counts() {
            assert!(products > 0 && products == batches, "a short prompt's attention");
        }
        // Keys and values of either type, and in blocks: of which all are pinned, and of which the frames hold a few.
        for (kv, pass, frames) in
            [(Some(KvType::F16), 150, 64), (Some(KvType::F32), 70, 64), (None, 150, 64), (None, 100, 14)]
        {
            let mut gpu = open();
            gpu.prompts.as_mut().unwrap().attention.work_of_a_launch = 0;
            let got = logits(gpu, kv, pass, frames);
            near(&format!("logits, {kv:?}, passes of {pass}, {frames} frames"), &got, &want, 2e-3);
            if let Some((products, batches)) = counts() {
                assert!(batches > products, "{kv:?}: no attention by products");
            }
        }
        finish(&driver, library);
    });
}
