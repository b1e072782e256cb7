//! Every kernel against plain loops on the CPU, over the emulated driver or a GPU (see `tests/cuda/emulated.rs`).

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

#[path = "../../tests/cuda/emulated.rs"]
pub(super) mod emulated;

use cudarc::driver::{CudaSlice, DevicePtr, DeviceRepr, ValidAsZeroBits};
use emulated::{Driver, driver};

use super::gpu::Gpu;
use super::kernels::{Attention, BLOCKS, Cache, Product, Table};
use crate::config::RopePairs;
use crate::dtype::WeightType;
use crate::kernels::{dequantise, encode};
use crate::sampler::{Draw, Sampler, argmax};

/// Runs a test on a GPU with kernels.
pub(super) fn on_gpu(test: &str, body: impl FnOnce(&Gpu)) {
    let Some(driver) = driver(test) else { return };
    let Driver { device, kernels, .. } = &driver;
    body(&Gpu::open(device, kernels.as_deref()).unwrap());
    driver.finish();
}

/// Device memory with these values.
pub(super) struct Memory<T> {
    pub slice: CudaSlice<T>,
    pub address: u64,
}

pub(super) fn put<T: DeviceRepr + ValidAsZeroBits + Copy>(gpu: &Gpu, values: &[T]) -> Memory<T> {
    // SAFETY: filled by the next line.
    let mut locked = unsafe { gpu.context.alloc_pinned_with_flags::<T>(values.len(), 0) }.unwrap();
    locked.as_mut_slice().unwrap().copy_from_slice(values);
    let slice = gpu.stream.clone_htod(&locked).unwrap();
    gpu.finish().unwrap();
    let address = slice.device_ptr(&gpu.stream).0;
    Memory { slice, address }
}

pub(super) fn room<T: DeviceRepr + ValidAsZeroBits>(gpu: &Gpu, len: usize) -> Memory<T> {
    let slice = gpu.stream.alloc_zeros::<T>(len).unwrap();
    let address = slice.device_ptr(&gpu.stream).0;
    Memory { slice, address }
}

pub(super) fn get<T: DeviceRepr + ValidAsZeroBits + Copy>(gpu: &Gpu, memory: &Memory<T>) -> Vec<T> {
    // SAFETY: filled by the copy, which is waited for.
    let mut locked = unsafe { gpu.context.alloc_pinned_with_flags::<T>(memory.slice.len(), 0) }.unwrap();
    gpu.stream.memcpy_dtoh(&memory.slice, &mut locked).unwrap();
    gpu.finish().unwrap();
    locked.as_slice().unwrap().to_vec()
}

pub(super) fn numbers(len: usize, seed: u32) -> Vec<f32> {
    let mut state = seed.wrapping_mul(2_654_435_761).wrapping_add(1);
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 8) as f32 / (1 << 23) as f32 - 1.0
    };
    (0..len).map(|_| next() + next() * next()).collect()
}

/// Fails unless the vectors are within 1e-5 of each other, relative to the expected one's length.
fn near(what: &str, got: &[f32], want: &[f32]) {
    assert_eq!(got.len(), want.len(), "{what}");
    let length = |v: &mut dyn Iterator<Item = f64>| v.map(|x| x * x).sum::<f64>().sqrt();
    let off = length(&mut got.iter().zip(want).map(|(a, b)| f64::from(*a) - f64::from(*b)));
    let all = length(&mut want.iter().map(|b| f64::from(*b)));
    // `make gpu-check` reads this line.
    println!("relative error {:.3e}, 1e-5 allowed: {what}", if all > 0.0 { off / all } else { off });
    assert!(off <= 1e-5 * all, "{what}: off by {off} of {all}");
}

/// Rows of a type, as bytes and as numbers.
pub(super) fn rows_of(dtype: WeightType, rows: usize, k: usize, seed: u32) -> (Vec<u8>, Vec<f32>) {
    let mut bytes = Vec::new();
    encode(dtype, &numbers(rows * k, seed), &mut bytes);
    let mut values = vec![0f32; rows * k];
    dequantise(dtype, &bytes, &mut values);
    (bytes, values)
}

pub(super) fn is_plain(dtype: WeightType) -> bool {
    matches!(dtype, WeightType::F32 | WeightType::F16 | WeightType::BF16)
}

#[test]
fn every_weight_type_is_decoded_wherever_it_lies() {
    on_gpu("every_weight_type_is_decoded_wherever_it_lies", |gpu| {
        for dtype in WeightType::ALL {
            let widths: &[usize] = if is_plain(dtype) { &[1, 7, 8, 77, 256] } else { &[256, 768] };
            let shifts: &[usize] = if is_plain(dtype) { &[0, 1, 2, 4, 6, 8] } else { &[0, 2, 4, 6] };
            for (k, shift) in widths.iter().flat_map(|k| shifts.iter().map(move |shift| (*k, *shift))) {
                let (bytes, want) = rows_of(dtype, 1, k, k as u32);
                let mut shifted = vec![0xa5; shift];
                shifted.extend(&bytes);
                let (row, out) = (put(gpu, &shifted), room::<f32>(gpu, k));
                gpu.kernels.decode(dtype, row.address + shift as u64, out.address, k as u32).unwrap();
                near(&format!("{dtype}, {k} at {shift}"), &get(gpu, &out), &want);
            }
        }
    });
}

#[test]
fn every_weight_type_is_multiplied_with_one_vector_and_with_many() {
    on_gpu("every_weight_type_is_multiplied_with_one_vector_and_with_many", |gpu| {
        for dtype in WeightType::ALL {
            let widths: &[usize] = if is_plain(dtype) { &[77, 512] } else { &[256, 1024] };
            for (&k, rows, m) in widths.iter().zip([13, 21]).map(|(k, rows)| (k, rows, 11)) {
                let (bytes, weights) = rows_of(dtype, rows, k, 3);
                let x = numbers(m * k, 4);
                let want = |j: usize, r: usize| -> f32 {
                    let pairs = weights[r * k..].iter().zip(&x[j * k..(j + 1) * k]);
                    pairs.map(|(w, x)| f64::from(*w) * f64::from(*x)).sum::<f64>() as f32
                };
                let want: Vec<f32> =
                    (0..m).flat_map(|j| (0..rows).map(move |r| (j, r))).map(|(j, r)| want(j, r)).collect();
                let (w, x) = (put(gpu, &bytes), put(gpu, &x));
                let stride = rows + 3;
                let product = Product {
                    dtype,
                    weights: w.address,
                    k: k as u32,
                    rows: rows as u32,
                    x: x.address,
                    m: m as u32,
                    out: 0,
                    stride: stride as u32,
                    accumulate: false,
                };
                let all = room::<f32>(gpu, m * stride);
                gpu.kernels.multiply(&Product { out: all.address, ..product }).unwrap();
                let dense =
                    |all: &[f32]| -> Vec<f32> { all.chunks(stride).flat_map(|row| &row[..rows]).copied().collect() };
                let together = get(gpu, &all);
                near(&format!("{dtype}, {k}"), &dense(&together), &want);
                assert!(together.chunks(stride).all(|row| row[rows..] == [0.0; 3]), "{dtype}: beyond the rows");

                // Each vector alone: the same bits, here added to what is there.
                let start = numbers(rows, 5);
                for j in 0..m {
                    let one = put(gpu, &start);
                    let (x, out) = (x.address + (j * k * 4) as u64, one.address);
                    let alone = Product { x, m: 1, out, stride: rows as u32, accumulate: true, ..product };
                    gpu.kernels.multiply(&alone).unwrap();
                    let expected: Vec<f32> =
                        start.iter().zip(&together[j * stride..]).map(|(start, sum)| start + sum).collect();
                    assert_eq!(get(gpu, &one), expected, "{dtype}, {k}, vector {j}");
                }
            }
        }
    });
}

#[test]
fn vectors_are_normalised_also_in_place() {
    on_gpu("vectors_are_normalised_also_in_place", |gpu| {
        for n in [1, 31, 64, 576, 1000] {
            let (x, weight) = (numbers(3 * n, 1), numbers(n, 2));
            let want: Vec<f32> = x
                .chunks(n)
                .flat_map(|x| {
                    let mean = x.iter().map(|v| v * v).sum::<f32>() / n as f32;
                    x.iter().zip(&weight).map(move |(x, w)| x / (mean + 1e-5).sqrt() * w)
                })
                .collect();
            let (x, weight, out) = (put(gpu, &x), put(gpu, &weight), room::<f32>(gpu, 3 * n));
            gpu.kernels.rms_norm(x.address, weight.address, out.address, 3, n as u32, 1e-5).unwrap();
            near(&format!("{n}"), &get(gpu, &out), &want);
            gpu.kernels.rms_norm(x.address, weight.address, x.address, 3, n as u32, 1e-5).unwrap();
            near(&format!("{n} in place"), &get(gpu, &x), &want);
        }
    });
}

#[test]
fn heads_are_turned_in_either_layout() {
    on_gpu("heads_are_turned_in_either_layout", |gpu| {
        let (m, heads, head_dim, pairs, past) = (5, 3, 32, 12, 1000);
        let x = numbers(m * heads * head_dim, 6);
        let frequencies: Vec<f32> = (0..pairs).map(|i| 10_000f32.powf(-(i as f32) / 16.0)).collect();
        for kind in [RopePairs::Adjacent, RopePairs::Halves] {
            let mut want = x.clone();
            for (at, head) in want.chunks_mut(head_dim).enumerate() {
                let position = (past + at / heads) as f32;
                for (i, frequency) in frequencies.iter().enumerate() {
                    let (sine, cosine) = (position * frequency).sin_cos();
                    let (a, b) = if kind == RopePairs::Adjacent { (2 * i, 2 * i + 1) } else { (i, i + pairs) };
                    (head[a], head[b]) = (head[a] * cosine - head[b] * sine, head[a] * sine + head[b] * cosine);
                }
            }
            let (x, frequencies) = (put(gpu, &x), put(gpu, &frequencies));
            let shape = attention(heads, heads, head_dim, past, m);
            gpu.kernels.rope(x.address, heads as u32, &shape, frequencies.address, pairs as u32, kind).unwrap();
            near(&format!("{kind:?}"), &get(gpu, &x), &want);
        }
    });
}

fn attention(heads: usize, kv_heads: usize, head_dim: usize, past: usize, m: usize) -> Attention {
    let [heads, kv_heads, head_dim, past, m] = [heads, kv_heads, head_dim, past, m].map(|n| n as u32);
    Attention { heads, kv_heads, head_dim, past, m }
}

/// `softmax(q K^T / sqrt(head_dim)) V` in f64, of queries `[m][heads][head_dim]` at position `past` and after it, over
/// keys and values `[position][kv_heads][head_dim]`.
fn attended(a: &Attention, q: &[f32], keys: &[f32], values: &[f32]) -> Vec<f32> {
    let [heads, kv_heads, head_dim, past, m] = [a.heads, a.kv_heads, a.head_dim, a.past, a.m].map(|n| n as usize);
    let mut out = Vec::new();
    for (t, h) in (0..m).flat_map(|t| (0..heads).map(move |h| (t, h))) {
        let query = &q[(t * heads + h) * head_dim..][..head_dim];
        let of = |all: &[f32], p: usize, i: usize| all[(p * kv_heads + h / (heads / kv_heads)) * head_dim + i];
        let scores: Vec<f64> = (0..past + t + 1)
            .map(|p| {
                let dot: f64 = (0..head_dim).map(|i| f64::from(query[i] * of(keys, p, i))).sum();
                (dot / (head_dim as f64).sqrt()).exp()
            })
            .collect();
        let total: f64 = scores.iter().sum();
        out.extend((0..head_dim).map(|i| {
            let mixed: f64 = scores.iter().enumerate().map(|(p, s)| s * f64::from(of(values, p, i))).sum();
            (mixed / total) as f32
        }));
    }
    out
}

#[test]
fn attention_sees_every_position_up_to_its_own() {
    on_gpu("attention_sees_every_position_up_to_its_own", |gpu| {
        for head_dim in [32, 64, 80, 128, 256] {
            let (heads, kv_heads, capacity) = (6, 2, 40);
            let caches = room::<f32>(gpu, 2 * kv_heads * capacity * head_dim);
            let (keys, values) = (caches.address, caches.address + (kv_heads * capacity * head_dim * 4) as u64);
            let cache = Cache { keys, values, capacity: capacity as u32 };
            let (mut all_k, mut all_v) = (Vec::new(), Vec::new());
            let mut past = 0;
            // Fewer positions than warps, one at a time, and many.
            for m in [3, 1, 1, 30] {
                let (q, k, v) = (
                    numbers(m * heads * head_dim, 7 + past as u32),
                    numbers(m * kv_heads * head_dim, 8 + past as u32),
                    numbers(m * kv_heads * head_dim, 9 + past as u32),
                );
                all_k.extend(&k);
                all_v.extend(&v);
                let shape = attention(heads, kv_heads, head_dim, past, m);
                let want = attended(&shape, &q, &all_k, &all_v);
                let (q, k, v, out) = (put(gpu, &q), put(gpu, &k), put(gpu, &v), room::<f32>(gpu, m * heads * head_dim));
                gpu.kernels.append(k.address, v.address, &cache, &shape).unwrap();
                gpu.kernels.attend(q.address, out.address, &cache, &shape).unwrap();
                near(&format!("heads of {head_dim}, {m} after {past}"), &get(gpu, &out), &want);
                past += m;
            }
        }
    });
}

/// Blocks of one layer's rows, which lie in any order in memory, each behind something else.
struct InBlocks {
    memory: Memory<f32>,
    each: usize,
    row: usize,
}

impl InBlocks {
    const ROOM: usize = 12;

    fn new(gpu: &Gpu, each: usize, row: usize) -> Self {
        Self { memory: room(gpu, Self::ROOM * (2 * each + 1) * row), each, row }
    }

    /// `count` blocks, from the `first` one on.
    fn table(&self, first: usize, count: usize) -> Table {
        let mut rows = [0; BLOCKS];
        for (nth, rows) in rows.iter_mut().enumerate().take(count) {
            let place = (first + nth) * 5 % Self::ROOM;
            *rows = self.memory.address + ((place * (2 * self.each + 1) + 1) * self.row * 4) as u64;
        }
        let [count, block_tokens, first] = [count, self.each, first * self.each].map(|n| n as u32);
        Table { rows, count, block_tokens, first }
    }

    /// The pass's results, with its rows stored and all blocks attended to in waves of `wave` blocks.
    fn run(&self, gpu: &Gpu, a: &Attention, [q, k, v]: [&[f32]; 3], wave: usize) -> Vec<f32> {
        let (past, m) = (a.past as usize, a.m as usize);
        let blocks = (past + m).div_ceil(self.each);
        let (q, k, v) = (put(gpu, q), put(gpu, k), put(gpu, v));
        let (out, state) = (room::<f32>(gpu, q.slice.len()), room::<f32>(gpu, m * 2 * a.heads as usize));
        let first = past / self.each;
        let to = self.table(first, blocks - first);
        let filled = (past % self.each) as u32;
        gpu.kernels.append_to_blocks((k.address, v.address), a.m, &to, filled, a).unwrap();
        for first in (0..blocks).step_by(wave) {
            let table = self.table(first, wave.min(blocks - first));
            gpu.kernels.attend_to_blocks(q.address, out.address, state.address, &table, a).unwrap();
        }
        get(gpu, &out)
    }
}

/// Neither the size of waves nor that of passes changes a bit.
#[test]
fn attention_to_blocks_sees_every_position_up_to_its_own_whatever_the_waves() {
    on_gpu("attention_to_blocks_sees_every_position_up_to_its_own_whatever_the_waves", |gpu| {
        for (head_dim, each) in [(32, 1), (64, 4), (80, 5), (128, 16), (256, 11)] {
            let (heads, kv_heads) = (6, 2);
            let (width, row) = (heads * head_dim, kv_heads * head_dim);
            let passes = [each + 2, 1, 1, 5 * each + 1];
            let all: usize = passes.iter().sum();
            let (q, k, v) = (numbers(all * width, 7), numbers(all * row, 8), numbers(all * row, 9));
            let mut found: Option<Vec<f32>> = None;
            for (wave, passes) in [(InBlocks::ROOM, &passes[..]), (1, &[all]), (2, &passes[..]), (3, &[all])] {
                let blocks = InBlocks::new(gpu, each, row);
                let (mut past, mut out) = (0, Vec::new());
                for &m in passes {
                    let end = past + m;
                    let shape = attention(heads, kv_heads, head_dim, past, m);
                    let (q, rows) = (&q[past * width..end * width], past * row..end * row);
                    let got = blocks.run(gpu, &shape, [q, &k[rows.clone()], &v[rows]], wave);
                    let what = format!("heads of {head_dim}, {m} after {past}, blocks of {each}, waves of {wave}");
                    near(&what, &got, &attended(&shape, q, &k, &v));
                    out.extend(got);
                    past = end;
                }
                assert_eq!(*found.get_or_insert(out.clone()), out, "heads of {head_dim}, waves of {wave}");
            }
        }
    });
}

#[test]
fn numbers_are_gated_and_added() {
    on_gpu("numbers_are_gated_and_added", |gpu| {
        let (gate, up) = (numbers(1000, 10), numbers(1000, 11));
        let want: Vec<f32> = gate.iter().zip(&up).map(|(g, u)| g / (1.0 + (-g).exp()) * u).collect();
        let (g, u) = (put(gpu, &gate), put(gpu, &up));
        gpu.kernels.silu_multiply(g.address, u.address, 1000).unwrap();
        near("silu", &get(gpu, &g), &want);
        let want: Vec<f32> = gate.iter().enumerate().map(|(i, g)| g + up[i % 10]).collect();
        let g = put(gpu, &gate);
        gpu.kernels.add(g.address, u.address, 1000, 10).unwrap();
        assert_eq!(get(gpu, &g), want);
    });
}

/// The token that the GPU chooses.
fn chosen(gpu: &Gpu, logits: &[f32], draw: Draw) -> u32 {
    let (logits, token) = (put(gpu, logits), room::<u32>(gpu, 1));
    gpu.kernels.choose(logits.address, token.address, logits.slice.len() as u32, draw).unwrap();
    get(gpu, &token)[0]
}

#[test]
fn the_likeliest_token_is_the_first_of_the_largest() {
    on_gpu("the_likeliest_token_is_the_first_of_the_largest", |gpu| {
        let nan = f32::NAN;
        let mut many = numbers(5000, 12);
        many[4321] = 9.0;
        many[1234] = 9.0;
        many[7] = nan;
        let rising: Vec<f32> = (0..2000).map(|i| i as f32).collect();
        let lists: [&[f32]; 7] =
            [&[1.0], &[nan, nan], &[f32::NEG_INFINITY; 3], &[-1.0, -0.5, -0.5], &[nan, -3.0], &many, &rising];
        for logits in lists {
            assert_eq!(chosen(gpu, logits, Draw::Best), argmax(logits), "{:?} ..", &logits[..logits.len().min(4)]);
        }
    });
}

#[test]
fn tokens_are_drawn_as_the_host_draws_them() {
    on_gpu("tokens_are_drawn_as_the_host_draws_them", |gpu| {
        for (n, temperature) in [(1, 1.0), (50, 0.7), (1024, 1.0), (5000, 1.3)] {
            let logits: Vec<f32> = numbers(n, 13).iter().map(|x| 3.0 * x).collect();
            // The same seed draws the same uniform numbers on both.
            let (mut host, mut device) = (Sampler::new(temperature, 5), Sampler::new(temperature, 5));
            for _ in 0..20 {
                let draw = device.draw().unwrap();
                assert_eq!(chosen(gpu, &logits, draw), host.sample(&logits), "{n} at {temperature}");
            }
            let end = chosen(gpu, &logits, Draw::Chance { temperature, uniform: 1.0 - f64::EPSILON });
            assert!((end as usize) < n);
        }
        assert!(Sampler::new(1.0, 0).top_k(3).draw().is_none());
    });
}
