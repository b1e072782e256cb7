//! Every kernel against plain loops on the CPU, over the emulated driver or a GPU (see `tests/cuda/emulated.rs`).

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

#[path = "../../tests/cuda/emulated.rs"]
pub(super) mod emulated;

use std::collections::BTreeSet;
use std::sync::{Mutex, PoisonError};

use cudarc::driver::{CudaSlice, DevicePtr, DeviceRepr, ValidAsZeroBits};
use emulated::{Driver, driver};

use super::attention::tests as attention;
use super::gpu::Gpu;
use super::kernels::{
    After, Cached, Choice, DeviceDraw, Element, INTERFACE, Matrix, Norm, PART, Queries, Turn, Vectors,
};
use super::prompt::tests as prompts;
use crate::config::RopePairs;
use crate::dtype::{ON_GPU, WeightType};
use crate::quants::{dequantise, quantise};
use crate::sampler::{Draw, Sampler, argmax};

/// Runs a test once in a process: alone, or for the test that looks at all kernels.
pub(super) fn once(test: &'static str, run: impl FnOnce()) {
    static DONE: Mutex<BTreeSet<&str>> = Mutex::new(BTreeSet::new());
    // A test that failed has not poisoned what the others need.
    let mut done = DONE.lock().unwrap_or_else(PoisonError::into_inner);
    if !done.contains(test) {
        run();
        done.insert(test);
    }
}

/// Runs a test on a GPU with kernels, once.
pub(super) fn on_gpu(test: &'static str, body: impl FnOnce(&Gpu)) {
    once(test, || {
        let Some(driver) = driver(test) else { return };
        let Driver { device, kernels, .. } = &driver;
        body(&Gpu::open(device, kernels.as_deref()).unwrap());
        driver.finish();
    });
}

/// No kernel of the sources is without a test; their macros are expanded, as the compiler sees them.
#[test]
fn every_kernel_of_the_sources_runs_in_these_tests() {
    let Some(named) = emulated::kernels_of_the_sources("every_kernel_of_the_sources_runs_in_these_tests") else {
        return;
    };
    // The compiler of the real kernels sees the same ones.
    let compiled = include_str!("kernels.ptx").split(".entry ").skip(1);
    let mut compiled: Vec<&str> = compiled.filter_map(|rest| rest.split('(').next()).map(str::trim).collect();
    let mut emulated: Vec<&str> = named.iter().map(String::as_str).collect();
    compiled.sort_unstable();
    emulated.sort_unstable();
    assert_eq!(compiled, emulated, "kernels of the PTX, and those of the emulation");
    for test in [
        every_weight_type_is_decoded_wherever_it_lies,
        products_have_the_same_bits_in_any_batch,
        products_of_awkward_rows_are_those_of_the_cpu,
        gates_of_two_matrices_are_one_launch,
        embeddings_are_gathered_by_tokens_on_the_gpu,
        heads_are_normalised_turned_and_stored,
        attention_in_parts_sees_every_position_up_to_its_own,
        the_next_token_is_chosen_on_the_gpu,
        numbers_are_gated,
        the_likeliest_token_is_the_first_of_the_largest,
        tokens_are_drawn_as_the_host_draws_them,
        prompts::weights_become_tiles_of_f16_wherever_they_lie,
        prompts::vectors_of_any_size_become_sixteen_bit_numbers,
        prompts::norms_are_part_of_what_makes_sixteen_bit_numbers,
        attention::products_give_the_attention_of_own_kernels,
    ] {
        test();
    }
    let Some(ran) = emulated::kernels_that_ran() else { return };
    // A name that stands for the others' parameters; nobody launches it.
    let launched = named.iter().filter(|name| *name != INTERFACE);
    let idle: Vec<&String> = launched.filter(|name| !ran.contains(name)).collect();
    assert!(idle.is_empty(), "no test runs {idle:?}");
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
    quantise(dtype, &numbers(rows * k, seed), &mut bytes);
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
        for dtype in ON_GPU {
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

/// Rows of a type in device memory, `shift` bytes behind an address that is aligned.
struct Rows {
    memory: Memory<u8>,
    dtype: WeightType,
    shift: usize,
    values: Vec<f32>,
}

impl Rows {
    fn new(gpu: &Gpu, dtype: WeightType, rows: usize, k: usize, shift: usize, seed: u32) -> Self {
        let (bytes, values) = rows_of(dtype, rows, k, seed);
        let mut shifted = vec![0xff; shift];
        shifted.extend(bytes);
        Self { memory: put(gpu, &shifted), dtype, shift, values }
    }

    fn address(&self) -> u64 {
        self.memory.address + self.shift as u64
    }

    fn as_norm(&self) -> Norm {
        Norm { weights: self.address(), dtype: self.dtype, epsilon: EPSILON }
    }

    fn as_bias(&self) -> Option<(u64, WeightType)> {
        Some((self.address(), self.dtype))
    }

    /// The matrix, with room for results that are `stride` apart.
    fn matrix(&self, k: usize, out: &Memory<f32>, stride: usize, bias: Option<&Rows>) -> Matrix {
        Matrix {
            dtype: self.dtype,
            weights: self.address(),
            rows: (self.values.len() / k) as u32,
            bias: bias.and_then(Self::as_bias),
            out: out.address,
            stride: stride as u32,
        }
    }
}

const EPSILON: f32 = 1e-5;

/// `x / rms(x) * norm`, or `x`.
fn normed(x: &[f32], norm: Option<&Rows>) -> Vec<f64> {
    let squares: f64 = x.iter().map(|x| f64::from(*x).powi(2)).sum();
    let scale = (squares / x.len() as f64 + f64::from(EPSILON)).sqrt();
    let weight = |i: usize| norm.map_or(1.0, |norm| f64::from(norm.values[i]) / scale);
    x.iter().enumerate().map(|(i, x)| f64::from(*x) * weight(i)).collect()
}

/// The products of all rows with one vector, with their biases.
fn products_of(rows: &Rows, x: &[f64], bias: Option<&Rows>) -> Vec<f32> {
    let dots = rows.values.chunks(x.len()).map(|row| row.iter().zip(x).map(|(w, x)| f64::from(*w) * x).sum::<f64>());
    dots.enumerate().map(|(r, dot)| (dot + bias.map_or(0.0, |bias| f64::from(bias.values[r]))) as f32).collect()
}

/// Launches of three matrices of different types, one of them of one row, at addresses of any alignment. Vectors that
/// share a launch, and their places in it, change no bit; the stages of the widest are used several times.
#[test]
fn products_have_the_same_bits_in_any_batch() {
    on_gpu("products_have_the_same_bits_in_any_batch", |gpu| {
        let all = ON_GPU;
        let norms = [WeightType::F32, WeightType::F16, WeightType::BF16];
        for (nth, dtype) in all.into_iter().enumerate() {
            let (k, most) = if nth % 4 == 0 { (5376, 9) } else { (256 * (1 + nth % 5), 9) };
            let sizes = [5, 1, 2];
            let shifts = [0, 2, 8];
            let matrices: Vec<Rows> = (0..3)
                .map(|i| {
                    let dtype = if i == 0 { dtype } else { all[(nth + 4 * i) % all.len()] };
                    Rows::new(gpu, dtype, sizes[i], k, shifts[(nth + i) % 3], (nth + i) as u32)
                })
                .collect();
            let norm = Rows::new(gpu, norms[nth % 3], 1, k, shifts[nth % 3], 40);
            let norm = (nth % 2 == 0).then_some(&norm);
            let biases: Vec<Rows> = (0..3).map(|i| Rows::new(gpu, norms[i], 1, sizes[i], 2, 50 + i as u32)).collect();
            let x = numbers(most * k, 60);
            let vectors = put(gpu, &x);
            let launch = |first: usize, m: usize| -> Vec<Vec<f32>> {
                // Beyond the rows, nothing is written.
                let outs: Vec<_> = sizes.iter().map(|rows| room::<f32>(gpu, m * (rows + 3))).collect();
                let launched: Vec<Matrix> = (0..3)
                    .map(|i| matrices[i].matrix(k, &outs[i], sizes[i] + 3, (i != 1).then_some(&biases[i])))
                    .collect();
                let x = vectors.address + (4 * first * k) as u64;
                let v = Vectors { x, k: k as u32, m: m as u32, rows: None, norm: norm.map(Rows::as_norm) };
                gpu.kernels.products(&launched, &v, After::Store).unwrap();
                let outs: Vec<Vec<f32>> = outs.iter().map(|out| get(gpu, out)).collect();
                (0..m)
                    .map(|j| {
                        let of = |i: usize| &outs[i][j * (sizes[i] + 3)..(j + 1) * (sizes[i] + 3)];
                        assert!((0..3).all(|i| of(i)[sizes[i]..] == [0.0; 3]), "{dtype}: beyond the rows");
                        (0..3).flat_map(|i| of(i)[..sizes[i]].to_vec()).collect()
                    })
                    .collect()
            };
            let alone: Vec<Vec<f32>> = (0..most).map(|j| launch(j, 1).remove(0)).collect();
            for (j, got) in alone.iter().enumerate() {
                let x = normed(&x[j * k..(j + 1) * k], norm);
                let of = |i: usize| products_of(&matrices[i], &x, (i != 1).then_some(&biases[i]));
                near(&format!("{dtype}, {k}, vector {j}"), got, &(0..3).flat_map(of).collect::<Vec<_>>());
            }
            for m in 2..=most {
                assert_eq!(launch(most - m, m), alone[most - m..], "{dtype}, {k}, {m} vectors");
            }
        }
    });
}

/// Rows whose length no piece of a load divides, at every address that a file may give them; vectors by their indices;
/// results that are added.
#[test]
fn products_of_awkward_rows_are_those_of_the_cpu() {
    on_gpu("products_of_awkward_rows_are_those_of_the_cpu", |gpu| {
        let plain = [WeightType::F32, WeightType::F16, WeightType::BF16];
        let odd: Vec<(WeightType, usize, usize)> = plain
            .into_iter()
            .flat_map(|dtype| [1, 7, 77, 1031].map(|k| [0, 1, 2, 4, 8, 13].map(|shift| (dtype, k, shift))))
            .flatten()
            .collect();
        let quantised = ON_GPU.into_iter().filter(|dtype| !is_plain(*dtype));
        let even = quantised.flat_map(|dtype| [0, 2, 8, 14].map(|shift| (dtype, dtype.block_elements(), shift)));
        for (dtype, k, shift) in odd.into_iter().chain(even) {
            let rows = Rows::new(gpu, dtype, 3, k, shift, (k + shift) as u32);
            let x = numbers(4 * k, 61);
            let (vectors, picked) = (put(gpu, &x), put(gpu, &[3u32, 0]));
            let start = numbers(6, 62);
            let out = put(gpu, &start);
            let v = Vectors { x: vectors.address, k: k as u32, m: 2, rows: Some((picked.address, 4)), norm: None };
            gpu.kernels.products(&[rows.matrix(k, &out, 3, None)], &v, After::Add).unwrap();
            let of = |j: usize| products_of(&rows, &normed(&x[j * k..(j + 1) * k], None), None);
            let want: Vec<f32> = of(3).into_iter().chain(of(0)).zip(&start).map(|(sum, start)| sum + start).collect();
            near(&format!("{dtype}, {k} at {shift}"), &get(gpu, &out), &want);
        }
    });
}

#[test]
fn gates_of_two_matrices_are_one_launch() {
    on_gpu("gates_of_two_matrices_are_one_launch", |gpu| {
        for (dtype, k, rows) in [(WeightType::F16, 70, 5), (WeightType::Q8_0, 288, 1), (WeightType::Q4_K, 256, 6)] {
            let [gate, up] = [70, 71].map(|seed| Rows::new(gpu, dtype, rows, k, 2, seed));
            let [gate_bias, up_bias] = [72, 73].map(|seed| Rows::new(gpu, WeightType::F32, 1, rows, 0, seed));
            let norm = Rows::new(gpu, WeightType::F32, 1, k, 0, 74);
            let x = numbers(3 * k, 75);
            let vectors = put(gpu, &x);
            let mut want = Vec::new();
            for x in x.chunks(k) {
                let x = normed(x, Some(&norm));
                let pairs =
                    products_of(&gate, &x, Some(&gate_bias)).into_iter().zip(products_of(&up, &x, Some(&up_bias)));
                want.extend(pairs.map(|(gate, up)| gate / (1.0 + (-gate).exp()) * up));
            }
            let mut alone = Vec::new();
            for m in [3, 1] {
                let out = room::<f32>(gpu, m * rows);
                let both = [gate.matrix(k, &out, rows, Some(&gate_bias)), up.matrix(k, &out, rows, Some(&up_bias))];
                let v =
                    Vectors { x: vectors.address, k: k as u32, m: m as u32, rows: None, norm: Some(norm.as_norm()) };
                gpu.kernels.products(&both, &v, After::Gate).unwrap();
                let got = get(gpu, &out);
                near(&format!("{dtype}, {m}"), &got, &want[..m * rows]);
                alone.push(got);
            }
            assert_eq!(alone[0][..rows], alone[1], "{dtype}: the first of three, and alone");
            let other = Matrix { dtype: WeightType::F32, ..gate.matrix(k, &vectors, rows, None) };
            let v = Vectors { x: vectors.address, k: k as u32, m: 1, rows: None, norm: None };
            assert!(gpu.kernels.products(&[other, gate.matrix(k, &vectors, rows, None)], &v, After::Gate).is_err());
        }
    });
}

#[test]
fn embeddings_are_gathered_by_tokens_on_the_gpu() {
    on_gpu("embeddings_are_gathered_by_tokens_on_the_gpu", |gpu| {
        for dtype in ON_GPU {
            let k = if is_plain(dtype) { 77 } else { 256 };
            let (rows, tokens) = (9, [8u32, 0, 3, 3, 9]);
            let matrix = Rows::new(gpu, dtype, rows, k, 2, 80);
            let (ids, out) = (put(gpu, &tokens), put(gpu, &vec![7f32; tokens.len() * k]));
            let m = tokens.len() as u32;
            gpu.kernels.embed((matrix.address(), dtype), rows as u32, k as u32, ids.address, out.address, m).unwrap();
            let row = |token: u32| matrix.values.get(token as usize * k..(token as usize + 1) * k);
            let want: Vec<f32> = tokens.iter().flat_map(|t| row(*t).map_or(vec![0.0; k], <[f32]>::to_vec)).collect();
            near(&format!("{dtype}"), &get(gpu, &out), &want);
        }
    });
}

/// Keys and values of two sequences in blocks that lie in any order, with room before each block's rows.
pub(super) struct Blocks {
    pub memory: Memory<u8>,
    table: Memory<u64>,
    element: Element,
    heads: usize,
    head_dim: usize,
    each: usize,
    stride: usize,
}

impl Blocks {
    const BEFORE: usize = 32;

    pub fn new(gpu: &Gpu, element: Element, [heads, head_dim]: [usize; 2], each: usize, stride: usize) -> Self {
        let row = heads * head_dim * element.bytes() as usize;
        let block = (Self::BEFORE + 2 * each * row).next_multiple_of(16);
        let memory = room::<u8>(gpu, 2 * stride * block);
        // The blocks of both sequences take turns, from the last one on.
        let count = 2 * stride;
        let place = |s: usize, b: usize| memory.address + ((count - 1 - (2 * b + s)) * block) as u64;
        let addresses: Vec<u64> =
            (0..2).flat_map(|s| (0..stride).map(move |b| (s, b))).map(|(s, b)| place(s, b)).collect();
        Self { table: put(gpu, &addresses), memory, element, heads, head_dim, each, stride }
    }

    pub fn cached(&self, m: usize, positions: &Memory<u32>, sequence_of: Option<&Memory<u32>>) -> Cached {
        let row = (self.heads * self.head_dim) as u64 * self.element.bytes();
        Cached {
            table: self.table.address,
            sequences: 2,
            stride: self.stride as u32,
            block_tokens: self.each as u32,
            keys: Self::BEFORE as u64,
            values: Self::BEFORE as u64 + self.each as u64 * row,
            element: self.element,
            heads: self.heads as u32,
            head_dim: self.head_dim as u32,
            m: m as u32,
            positions: positions.address,
            sequence_of: sequence_of.map(|memory| memory.address),
        }
    }

    /// Keys or values of one position of a sequence, as numbers.
    fn row(&self, bytes: &[u8], table: &[u64], sequence: usize, position: usize, values: bool) -> Vec<f32> {
        let size = self.element.bytes() as usize;
        let row = self.heads * self.head_dim * size;
        let block = (table[sequence * self.stride + position / self.each] - self.memory.address) as usize;
        let at = block + Self::BEFORE + (position % self.each + if values { self.each } else { 0 }) * row;
        let bytes = &bytes[at..at + row];
        match self.element {
            Element::F16 => {
                bytes.chunks(2).map(|b| half::f16::from_bits(u16::from_le_bytes([b[0], b[1]])).to_f32()).collect()
            }
            Element::F32 => bytes.chunks(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect(),
        }
    }
}

/// Numbers as the cache keeps them.
pub(super) fn kept_as(element: Element, values: &[f32]) -> Vec<f32> {
    let keep = |value: &f32| if element == Element::F16 { half::f16::from_f32(*value).to_f32() } else { *value };
    values.iter().map(keep).collect()
}

#[test]
fn heads_are_normalised_turned_and_stored() {
    on_gpu("heads_are_normalised_turned_and_stored", |gpu| {
        for (nth, element) in [Element::F16, Element::F32].into_iter().enumerate() {
            for kind in [RopePairs::Adjacent, RopePairs::Halves] {
                let (heads, kv_heads, head_dim, pairs, m) = (5, 2, [40, 200][nth], 13, 3);
                let (positions, sequences) = ([7u32, 0, 19], [0u32, 1, 1]);
                let [q, k, v] = [heads, kv_heads, kv_heads].map(|heads| numbers(m * heads * head_dim, heads as u32));
                let frequencies: Vec<f32> = (0..pairs).map(|i| 10_000f32.powf(-(i as f32) / 16.0)).collect();
                let norm = Rows::new(gpu, WeightType::BF16, 1, head_dim, 2, 90);
                let turned = |x: &[f32], heads: usize, norm: Option<&Rows>| -> Vec<f32> {
                    let mut all = Vec::new();
                    for (at, head) in x.chunks(head_dim).enumerate() {
                        let mut head = normed(head, norm);
                        for (i, frequency) in frequencies.iter().enumerate() {
                            let angle = f64::from(positions[at / heads] as f32 * frequency);
                            let (a, b) = if kind == RopePairs::Adjacent { (2 * i, 2 * i + 1) } else { (i, i + pairs) };
                            let (p, q) = (head[a], head[b]);
                            head[a] = p * angle.cos() - q * angle.sin();
                            head[b] = p * angle.sin() + q * angle.cos();
                        }
                        all.extend(head.into_iter().map(|x| x as f32));
                    }
                    all
                };
                let blocks = Blocks::new(gpu, element, [kv_heads, head_dim], 6, 4);
                let (at, of) = (put(gpu, &positions), put(gpu, &sequences));
                let [queries, keys, values] = [&q, &k, &v].map(|numbers| put(gpu, numbers));
                let turning = put(gpu, &frequencies);
                let turn = Turn {
                    q: queries.address,
                    k: keys.address,
                    v: values.address,
                    heads: heads as u32,
                    q_norm: (nth == 0).then(|| norm.as_norm()),
                    k_norm: (nth == 0).then(|| norm.as_norm()),
                    frequencies: turning.address,
                    pairs: pairs as u32,
                    kind,
                };
                gpu.kernels.turn(&turn, &blocks.cached(m, &at, Some(&of))).unwrap();
                let norm = (nth == 0).then_some(&norm);
                near(&format!("queries, {kind:?}"), &get(gpu, &queries), &turned(&q, heads, norm));
                let (bytes, table) = (get(gpu, &blocks.memory), get(gpu, &blocks.table));
                let turned = turned(&k, kv_heads, norm);
                let width = kv_heads * head_dim;
                for j in 0..m {
                    let (sequence, position) = (sequences[j] as usize, positions[j] as usize);
                    let stored = |values| blocks.row(&bytes, &table, sequence, position, values);
                    let range = j * width..(j + 1) * width;
                    let off: Vec<f32> = stored(false).iter().zip(&turned[range.clone()]).map(|(a, b)| a - b).collect();
                    let most = if element == Element::F16 { 2e-3 } else { 1e-5 };
                    assert!(off.iter().all(|off| off.abs() < most), "keys of vector {j}, {kind:?}: {off:?}");
                    assert_eq!(stored(true), kept_as(element, &v[range]), "values of vector {j}");
                }
                let touched = bytes.iter().filter(|byte| **byte != 0).count();
                assert!(touched <= 2 * m * width * element.bytes() as usize, "more than {m} rows were written");
            }
        }
    });
}

/// Single vectors in parts, and prompts, give the same bits, whatever the blocks of the launch, the waves, the other
/// sequences, and the blocks that keys and values are in.
#[test]
fn attention_in_parts_sees_every_position_up_to_its_own() {
    on_gpu("attention_in_parts_sees_every_position_up_to_its_own", |gpu| {
        let part = PART as usize;
        // Heads that share keys: 1, 3, 12; elements that are no multiple of eight; positions of one, of three parts.
        let shapes = [
            (Element::F16, 6, 2, 64, 2 * part + 3),
            (Element::F32, 2, 2, 36, part),
            (Element::F16, 12, 1, 80, part + 2),
            (Element::F32, 4, 2, 128, part + 1),
            (Element::F16, 4, 1, 128, 9),
            (Element::F32, 1, 1, 256, 2 * part),
            (Element::F16, 2, 1, 256, part + 5),
            (Element::F32, 2, 1, 64, 3),
        ];
        for (nth, (element, heads, kv_heads, head_dim, len)) in shapes.into_iter().enumerate() {
            let (width, row) = (heads * head_dim, kv_heads * head_dim);
            let what = format!("{element:?}, {heads} heads of {head_dim}, {len} positions");
            let q = numbers(len * width, 7);
            let [keys, values] = [8, 9].map(|seed| kept_as(element, &numbers(len * row, seed)));
            let each = [7, 512, 64][nth % 3];
            let blocks = Blocks::new(gpu, element, [kv_heads, head_dim], each, len.div_ceil(each));
            // Sequence 1 has the rows; without rotation, they are stored as they are.
            let at: Vec<u32> = (0..len as u32).collect();
            let (positions, second) = (put(gpu, &at), put(gpu, &vec![1u32; len]));
            let (queries, k, v) = (put(gpu, &q), put(gpu, &keys), put(gpu, &values));
            let turn = Turn {
                q: queries.address,
                k: k.address,
                v: v.address,
                heads: heads as u32,
                q_norm: None,
                k_norm: None,
                frequencies: queries.address,
                pairs: 0,
                kind: RopePairs::Halves,
            };
            gpu.kernels.turn(&turn, &blocks.cached(len, &positions, Some(&second))).unwrap();

            let parts = len.div_ceil(part) as u32;
            // The last few, one of them the first of its part, in parts.
            let first = (len - 1) / part * part;
            let mut picked: Vec<usize> = vec![0, first.saturating_sub(1), first, len - 1];
            picked.dedup();
            let m = picked.len();
            let ids: Vec<u32> = picked.iter().map(|p| *p as u32).collect();
            let (some, of) = (put(gpu, &ids), put(gpu, &vec![1u32; m]));
            let some_q: Vec<f32> = picked.iter().flat_map(|p| &q[p * width..(p + 1) * width]).copied().collect();
            let some_q = put(gpu, &some_q);
            let mut found: Vec<Vec<f32>> = Vec::new();
            for (side_by_side, waves) in
                [(1, std::iter::once(0..parts).collect::<Vec<_>>()), (5, (0..parts).map(|p| p..p + 1).collect())]
            {
                let kept = room::<f32>(gpu, m * heads * parts as usize * (2 + head_dim));
                let out = room::<f32>(gpu, m * width);
                let kept_at = kept.address;
                let all = Queries { q: some_q.address, out: out.address, heads: heads as u32, kept: kept_at, parts };
                let cached = blocks.cached(m, &some, Some(&of));
                for wave in waves {
                    gpu.kernels.attend_parts(&all, &cached, wave, side_by_side).unwrap();
                }
                gpu.kernels.merge(&all, &cached).unwrap();
                found.push(get(gpu, &out));
            }
            assert_eq!(found[0], found[1], "{what}: waves");
            for (got, p) in found[0].chunks(width).zip(&picked) {
                let shape = Shape { heads, kv_heads, head_dim, past: *p, m: 1 };
                near(&format!("{what}, position {p}"), got, &attended(&shape, &q[p * width..], &keys, &values));
            }

            // A prompt: of all vectors, or of those from the second one on.
            for (begin, waves) in
                [(0, std::iter::once(0..parts).collect::<Vec<_>>()), (1, (0..parts).map(|p| p..p + 1).collect())]
            {
                let m = len - begin;
                let (kept, out) = (room::<f32>(gpu, m * heads * 2), room::<f32>(gpu, m * width));
                let (x, p) = (queries.address + (4 * begin * width) as u64, positions.address + 4 * begin as u64);
                let all = Queries { q: x, out: out.address, heads: heads as u32, kept: kept.address, parts };
                let cached = Cached { positions: p, ..blocks.cached(m, &positions, Some(&second)) };
                for wave in waves {
                    gpu.kernels.attend_prompt(&all, &cached, wave).unwrap();
                }
                let got = get(gpu, &out);
                for (nth, p) in picked.iter().enumerate().filter(|(_, p)| **p >= begin) {
                    let got = &got[(p - begin) * width..(p - begin + 1) * width];
                    assert_eq!(got, &found[0][nth * width..(nth + 1) * width], "{what}: position {p} of a prompt");
                }
            }
        }
    });
}

#[test]
fn the_next_token_is_chosen_on_the_gpu() {
    on_gpu("the_next_token_is_chosen_on_the_gpu", |gpu| {
        let (m, n, ring) = (3, 1500, 4);
        let logits: Vec<f32> = numbers(m * n, 15).iter().map(|x| 4.0 * x).collect();
        let mut samplers = [Sampler::greedy(), Sampler::new(0.8, 3), Sampler::new(1.2, 4)];
        let mut hosts = [Sampler::greedy(), Sampler::new(0.8, 3), Sampler::new(1.2, 4)];
        let (values, tokens) = (put(gpu, &logits), room::<u32>(gpu, m));
        let (positions, said) = (put(gpu, &[2u32, 9, 100]), room::<u32>(gpu, m * ring));
        for round in 0..5u32 {
            let draws: Vec<DeviceDraw> = samplers.iter_mut().map(|sampler| sampler.draw().unwrap().into()).collect();
            let draws = put(gpu, &draws);
            let choice = Choice {
                logits: values.address,
                n: n as u32,
                m: m as u32,
                draws: draws.address,
                tokens: tokens.address,
                positions: positions.address,
                said: said.address,
                ring: ring as u32,
            };
            gpu.kernels.choose_next(&choice).unwrap();
            let want: Vec<u32> = hosts.iter_mut().zip(logits.chunks(n)).map(|(host, row)| host.sample(row)).collect();
            assert_eq!(get(gpu, &tokens), want, "round {round}");
            assert_eq!(get(gpu, &positions), [3 + round, 10 + round, 101 + round]);
            let ringed = get(gpu, &said);
            for (j, before) in [2 + round, 9 + round, 100 + round].into_iter().enumerate() {
                assert_eq!(ringed[j * ring + before as usize % ring], want[j], "round {round}, row {j}");
            }
        }
    });
}

/// The heads of a pass, and its positions.
pub(super) struct Shape {
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    pub past: usize,
    pub m: usize,
}

/// `softmax(q K^T / sqrt(head_dim)) V` in f64, of queries `[m][heads][head_dim]` at position `past` and after it, over
/// keys and values `[position][kv_heads][head_dim]`.
pub(super) fn attended(a: &Shape, q: &[f32], keys: &[f32], values: &[f32]) -> Vec<f32> {
    let Shape { heads, kv_heads, head_dim, past, m } = *a;
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
fn numbers_are_gated() {
    on_gpu("numbers_are_gated", |gpu| {
        let (gate, up) = (numbers(1000, 10), numbers(1000, 11));
        let want: Vec<f32> = gate.iter().zip(&up).map(|(g, u)| g / (1.0 + (-g).exp()) * u).collect();
        let (g, u) = (put(gpu, &gate), put(gpu, &up));
        gpu.kernels.silu_multiply(g.address, u.address, 1000).unwrap();
        near("silu", &get(gpu, &g), &want);
    });
}

/// The token that the GPU chooses.
fn chosen(gpu: &Gpu, logits: &[f32], draw: Draw) -> u32 {
    let (values, draws) = (put(gpu, logits), put(gpu, &[DeviceDraw::from(draw)]));
    let (token, position, said) = (room::<u32>(gpu, 1), room::<u32>(gpu, 1), room::<u32>(gpu, 1));
    let choice = Choice {
        logits: values.address,
        n: logits.len() as u32,
        m: 1,
        draws: draws.address,
        tokens: token.address,
        positions: position.address,
        said: said.address,
        ring: 1,
    };
    gpu.kernels.choose_next(&choice).unwrap();
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
