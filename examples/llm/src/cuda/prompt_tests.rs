//! Prompts' products against sums in f64, over the emulated driver and a cuBLASLt on the CPU, or a GPU with its own.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::sync::Mutex;

use super::super::gemm::{SHAPES, Workspace};
use super::super::gpu::Gpu;
use super::super::tests::{Memory, emulated, get, is_plain, numbers, once, put, room, rows_of};
use super::*;

#[path = "../../tests/cuda/cublaslt.rs"]
pub(in super::super) mod cublaslt;

use cublaslt::{CublasLt, driver_with_library, finish, no_library};

/// Fails unless the vectors are within `tolerance` of each other, relative to the expected one's length. Returns how
/// far apart they are.
pub(in super::super) fn near(what: &str, got: &[f32], want: &[f64], tolerance: f64) -> f64 {
    assert_eq!(got.len(), want.len(), "{what}");
    let length = |v: &mut dyn Iterator<Item = f64>| v.map(|x| x * x).sum::<f64>().sqrt();
    let off = length(&mut got.iter().zip(want).map(|(a, b)| f64::from(*a) - b));
    let all = length(&mut want.iter().copied());
    let apart = if all > 0.0 { off / all } else { off };
    // `make gpu-check` reads this line.
    println!("relative error {apart:.3e}, {tolerance:.0e} allowed: {what}");
    assert!(off <= tolerance * all, "{what}: off by {off} of {all}");
    apart
}

fn prompts(gpu: &Gpu) -> &Prompts {
    gpu.prompts.as_ref().unwrap()
}

/// Room whose tiles have `tile_bytes`.
fn room_for(gpu: &Gpu, pass: usize, widest: usize, tile_bytes: u64) -> (Room, Memory<u8>) {
    let workspace = 1 << 20;
    let mut end = 0u64;
    let mut place = |bytes: u64| {
        let start = end;
        end += bytes.next_multiple_of(256);
        start
    };
    let places = Room {
        tile: place(tile_bytes),
        tile_bytes,
        halves: place((pass * widest * 2) as u64),
        scales: place((pass * 4) as u64),
        products: place((pass * widest * 4) as u64),
        keys: 0,
        values: 0,
        positions: 0,
        workspace: Workspace { address: place(workspace), bytes: workspace },
    };
    let memory = room::<u8>(gpu, end as usize);
    (places.at(memory.address), memory)
}

#[test]
pub(in super::super) fn weights_become_tiles_of_f16_wherever_they_lie() {
    with_library("weights_become_tiles_of_f16_wherever_they_lie", |gpu, _| {
        for dtype in ON_GPU {
            let widths: &[usize] = if is_plain(dtype) { &[1, 7, 8, 77, 256] } else { &[256, 768] };
            let shifts: &[usize] = if is_plain(dtype) { &[0, 1, 2, 8] } else { &[0, 2, 8] };
            for (k, shift) in widths.iter().flat_map(|k| shifts.iter().map(move |shift| (*k, *shift))) {
                let (rows, ld) = (3, k.next_multiple_of(8));
                let (bytes, values) = rows_of(dtype, rows, k, k as u32);
                let mut shifted = vec![0xa5; shift];
                shifted.extend(&bytes);
                let (weights, out) = (put(gpu, &shifted), put(gpu, &vec![0x7777u16; (rows + 1) * ld]));
                let from = weights.address + shift as u64;
                prompts(gpu).tile(&gpu.kernels, dtype, from, (out.address, ld as u32), k as u32, rows as u32).unwrap();
                let got = get(gpu, &out);
                for (row, values) in got.chunks(ld).zip(values.chunks(k)) {
                    let want: Vec<u16> = values.iter().map(|x| half::f16::from_f32(*x).to_bits()).collect();
                    // Both may round a tie, of weights whose last bits a multiplication and an addition made.
                    let apart = row.iter().zip(&want).map(|(a, b)| a.abs_diff(*b)).max();
                    assert!(apart <= Some(1), "{dtype}, {k} at {shift}: {row:?}, not {want:?}");
                    assert!(row[k..].iter().all(|x| *x == 0), "{dtype}, {k}: what fills a row is not zero");
                }
                assert!(got[rows * ld..].iter().all(|x| *x == 0x7777), "{dtype}, {k}: beyond the rows");
            }
        }
        // What no f16 can be.
        let (weights, out) = (put(gpu, &[1e9f32, -1e9, 65504.0, f32::NAN, 1e-9, 0.5, 0.0, 1.0]), room::<u16>(gpu, 8));
        prompts(gpu).tile(&gpu.kernels, WeightType::F32, weights.address, (out.address, 8), 8, 1).unwrap();
        let got: Vec<f32> = get(gpu, &out).iter().map(|x| half::f16::from_bits(*x).to_f32()).collect();
        assert_eq!(got[..3], [65504.0, -65504.0, 65504.0]);
        assert!(got[3].is_nan());
        assert_eq!(got[4..], [0.0, 0.5, 0.0, 1.0]);
    });
}

/// Numbers that f16 cannot hold, and such that it holds badly: every vector has a scale of its own.
#[test]
pub(in super::super) fn vectors_of_any_size_become_sixteen_bit_numbers() {
    with_library("vectors_of_any_size_become_sixteen_bit_numbers", |gpu, _| {
        let (m, k, ld) = (6, 300, 304);
        let mut x = numbers(m * k, 14);
        for (row, scale) in [(1, 1e6), (2, 1e-9), (3, 0.0), (4, 1e30)] {
            x[row * k..(row + 1) * k].iter_mut().for_each(|x| *x *= scale);
        }
        // One number that is much larger than the others.
        x[5 * k] = 3e7;
        let input = put(gpu, &x);
        let (halves, scales) = (room::<u16>(gpu, m * ld), room::<f32>(gpu, m));
        let vectors = Input::new(input.address, m as u32, k as u32, None);
        prompts(gpu).halves_f16(&gpu.kernels, &vectors, (halves.address, ld as u32), scales.address).unwrap();
        let numbers: Vec<f32> = get(gpu, &halves).iter().map(|x| half::f16::from_bits(*x).to_f32()).collect();
        // The kernel puts the scales back, and adds to what is there.
        let (products, out) = (put(gpu, &numbers), put(gpu, &vec![0f32; m * k]));
        let n = k as u32;
        let matrix = Matrix { dtype: WeightType::F16, weights: 0, rows: n, bias: None, out: out.address, stride: n };
        let from = Scaled { products: products.address, pitch: ld as u32, scales: Some(scales.address) };
        prompts(gpu).unscale(&gpu.kernels, from, &matrix, m as u32, Then::Add).unwrap();
        for (got, x) in get(gpu, &out).chunks(k).zip(x.chunks(k)) {
            // Below a 2^28th of the largest number, what is lost is a 2^38th of that.
            let least = x.iter().fold(0f32, |most, x| most.max(x.abs())) * 2f32.powi(-38);
            for (got, x) in got.iter().zip(x) {
                assert!((got - x).abs() <= (x.abs() / 2048.0).max(least), "{got}, not {x}");
            }
        }
        assert!(numbers.chunks(ld).all(|row| row[k..].iter().all(|x| *x == 0.0)));
        prompts(gpu).halves_bf16(&gpu.kernels, &vectors, (halves.address, ld as u32)).unwrap();
        for (row, x) in get(gpu, &halves).chunks(ld).zip(x.chunks(k)) {
            let want: Vec<u16> = x.iter().map(|x| half::bf16::from_f32(*x).to_bits()).collect();
            assert_eq!(row[..k], want);
            assert!(row[k..].iter().all(|x| *x == 0));
        }
    });
}

/// By norms of every plain type, wherever they lie.
#[test]
pub(in super::super) fn norms_are_part_of_what_makes_sixteen_bit_numbers() {
    with_library("norms_are_part_of_what_makes_sixteen_bit_numbers", |gpu, _| {
        for (dtype, k, shift) in [
            (WeightType::F32, 1usize, 0usize),
            (WeightType::F16, 31, 2),
            (WeightType::BF16, 576, 6),
            (WeightType::F32, 1000, 8),
        ] {
            let (m, ld) = (3, k.next_multiple_of(8));
            let (bytes, weights) = rows_of(dtype, 1, k, 2);
            let mut shifted = vec![0xff; shift];
            shifted.extend(bytes);
            let x: Vec<f32> = numbers(m * k, 1).into_iter().map(|x| 1000.0 * x).collect();
            let (input, norm) = (put(gpu, &x), put(gpu, &shifted));
            let epsilon = 1e-5f32;
            let norm = Norm { weights: norm.address + shift as u64, dtype, epsilon };
            let vectors = Input::new(input.address, m as u32, k as u32, Some(norm));
            let (halves, scales) = (room::<u16>(gpu, m * ld), room::<f32>(gpu, m));
            let want = x.chunks(k).map(|x| {
                let squares: f64 = x.iter().map(|x| f64::from(*x).powi(2)).sum();
                let scale = (squares / k as f64 + f64::from(epsilon)).sqrt();
                x.iter().zip(&weights).map(|(x, w)| f64::from(*x) / scale * f64::from(*w)).collect::<Vec<_>>()
            });
            let want: Vec<Vec<f64>> = want.collect();
            prompts(gpu).halves_f16(&gpu.kernels, &vectors, (halves.address, ld as u32), scales.address).unwrap();
            let scales = get(gpu, &scales);
            for ((got, want), scale) in get(gpu, &halves).chunks(ld).zip(&want).zip(scales) {
                let numbers: Vec<f32> = got[..k].iter().map(|x| half::f16::from_bits(*x).to_f32() * scale).collect();
                near(&format!("{dtype}, {k} at {shift}, f16"), &numbers, want, 5e-4);
                assert!(got[k..].iter().all(|x| *x == 0));
            }
            prompts(gpu).halves_bf16(&gpu.kernels, &vectors, (halves.address, ld as u32)).unwrap();
            for (got, want) in get(gpu, &halves).chunks(ld).zip(&want) {
                let numbers: Vec<f32> = got[..k].iter().map(|x| half::bf16::from_bits(*x).to_f32()).collect();
                near(&format!("{dtype}, {k} at {shift}, bf16"), &numbers, want, 4e-3);
                assert!(got[k..].iter().all(|x| *x == 0));
            }
        }
    });
}

/// Of two matrices, in tiles of a few rows, with and without biases; also where the library has no kernel.
#[test]
fn gates_are_part_of_putting_products_back() {
    with_library("gates_are_part_of_putting_products_back", |gpu, library| {
        for (dtype, k, refused) in [
            (WeightType::Q8_0, 256, 0),
            (WeightType::BF16, 64, 0),
            (WeightType::Q4_K, 512, 2),
            (WeightType::BF16, 72, 2),
        ] {
            if let Some(library) = library {
                library.refuse(refused);
            }
            let (m, rows) = (9, 21);
            let [gate, up] = [11, 12].map(|seed| rows_of(dtype, rows, k, seed));
            let x = numbers(m * k, 13);
            let ((bias, biases), shift) = (rows_of(WeightType::F16, 1, rows, 14), 2);
            let mut shifted = vec![0xff; shift];
            shifted.extend(bias);
            let (vectors, bias) = (put(gpu, &x), put(gpu, &shifted));
            let memory = [&gate, &up].map(|(bytes, _)| (put(gpu, bytes), room::<f32>(gpu, m * rows)));
            let matrix = |nth: usize| Matrix {
                dtype,
                weights: memory[nth].0.address,
                rows: rows as u32,
                bias: (nth == 1).then_some((bias.address + shift as u64, WeightType::F16)),
                out: memory[nth].1.address,
                stride: rows as u32,
            };
            let (room, _memory) = room_for(gpu, m, 512, 8 * 2 * k as u64);
            let mut input = Input::new(vectors.address, m as u32, k as u32, None);
            prompts(gpu).multiply(&gpu.kernels, &room, &matrix(0), &mut input, Then::Store).unwrap();
            let then = Then::Gate(memory[0].1.address);
            prompts(gpu).multiply(&gpu.kernels, &room, &matrix(1), &mut input, then).unwrap();
            if let Some(library) = library {
                library.refuse(0);
            }
            let dot = |w: &[f32], x: &[f32]| w.iter().zip(x).map(|(w, x)| f64::from(*w) * f64::from(*x)).sum::<f64>();
            let mut want = Vec::new();
            for x in x.chunks(k) {
                for r in 0..rows {
                    let [gate, up] = [&gate.1, &up.1].map(|w| dot(&w[r * k..(r + 1) * k], x));
                    want.push(gate / (1.0 + (-gate).exp()) * (up + f64::from(biases[r])));
                }
            }
            let tolerance = match (refused, dtype) {
                (0, WeightType::BF16) => 1e-2,
                (0, _) => 1e-3,
                _ => 1e-5,
            };
            near(&format!("gates of {dtype}, {refused} refused"), &get(gpu, &memory[0].1), &want, tolerance);
        }
    });
}

/// A product of a prompt, and what the library had to do for it.
struct Case {
    dtype: WeightType,
    rows: usize,
    k: usize,
    m: usize,
    /// Bytes that lie between an address that is a multiple of 256 and the weights.
    shift: usize,
    accumulate: bool,
    tile_bytes: u64,
}

impl Case {
    /// The results, those of sums in f64, and whatever lies between the results.
    fn run(&self, gpu: &Gpu) -> (Vec<f32>, Vec<f64>) {
        let Self { dtype, rows, k, m, shift, accumulate, tile_bytes } = *self;
        let (bytes, weights) = rows_of(dtype, rows, k, 3);
        let x = numbers(m * k, 4);
        let mut shifted = vec![0xa5; shift];
        shifted.extend(&bytes);
        let stride = rows + 3;
        let start = numbers(m * stride, 5);
        let (w, vectors, out) = (put(gpu, &shifted), put(gpu, &x), put(gpu, &start));
        let (room, _memory) = room_for(gpu, m, k.max(rows).next_multiple_of(8), tile_bytes);
        // What is not added to what is there has a bias.
        let bias = numbers(rows, 6);
        let bias_at = put(gpu, &bias);
        let matrix = Matrix {
            dtype,
            weights: w.address + shift as u64,
            rows: rows as u32,
            bias: (!accumulate).then_some((bias_at.address, WeightType::F32)),
            out: out.address,
            stride: stride as u32,
        };
        let mut input = Input::new(vectors.address, m as u32, k as u32, None);
        let then = if accumulate { Then::Add } else { Then::Store };
        prompts(gpu).multiply(&gpu.kernels, &room, &matrix, &mut input, then).unwrap();
        let got = get(gpu, &out);
        let mut want: Vec<f64> = start.iter().map(|x| f64::from(*x)).collect();
        for (j, r) in (0..m).flat_map(|j| (0..rows).map(move |r| (j, r))) {
            let pairs = weights[r * k..(r + 1) * k].iter().zip(&x[j * k..(j + 1) * k]);
            let sum: f64 = pairs.map(|(w, x)| f64::from(*w) * f64::from(*x)).sum();
            want[j * stride + r] = sum + if accumulate { want[j * stride + r] } else { f64::from(bias[r]) };
        }
        for (got, start) in got.chunks(stride).zip(start.chunks(stride)) {
            assert_eq!(got[rows..], start[rows..], "{dtype}: beyond the rows");
        }
        (got, want)
    }
}

/// Runs a test on a GPU with a library: the tests' own over the emulated driver, of which `body` gets the counts.
pub(in super::super) fn with_library(test: &'static str, body: impl FnOnce(&Gpu, Option<&CublasLt>)) {
    // One at a time, to the end: the library counts the objects of the whole process.
    once(test, || run_with_library(test, body));
}

fn run_with_library(test: &str, body: impl FnOnce(&Gpu, Option<&CublasLt>)) {
    let Some((driver, library)) = driver_with_library(test) else { return };
    let mut gpu = Gpu::open(&driver.device, driver.kernels.as_deref()).unwrap();
    let Some(prompts) = &mut gpu.prompts else { return no_library(test) };
    // The prompts of tests are short.
    prompts.attention.work_of_a_launch = 0;
    if let Some(library) = library {
        // What other tests of this process have multiplied does not count.
        library.products();
        library.least_alignment();
    }
    body(&gpu, library);
    drop(gpu);
    finish(&driver, library);
}

/// Offsets 0 and 8 are those of safetensors, 2 and 6 those of blocks in a GGUF file.
#[test]
fn cublaslt_multiplies_weights_of_every_type_with_many_vectors_wherever_they_lie() {
    with_library("cublaslt_multiplies_weights_of_every_type_with_many_vectors_wherever_they_lie", |gpu, library| {
        let mut worst = [0f64; 2];
        for dtype in ON_GPU {
            let (widths, shifts): (&[usize], &[usize]) =
                if is_plain(dtype) { (&[77, 512], &[0, 2, 8]) } else { (&[256, 768], &[0, 2, 6, 8]) };
            for (k, shift) in widths.iter().flat_map(|k| shifts.iter().map(move |shift| (*k, *shift))) {
                for (m, rows, accumulate, tile_bytes) in [(9, 21, false, 1 << 20), (33, 64, true, 20 * 2 * 768)] {
                    let case = Case { dtype, rows, k, m, shift, accumulate, tile_bytes };
                    let (got, want) = case.run(gpu);
                    let in_place = dtype == WeightType::BF16 && shift == 0 && k % 8 == 0;
                    let tolerance = if in_place { 4e-3 } else { 5e-4 };
                    let what = format!("cuBLASLt, {dtype}, {rows} x {k} at {shift} by {m}");
                    let apart = near(&what, &got, &want, tolerance);
                    worst[usize::from(in_place)] = worst[usize::from(in_place)].max(apart);
                    let Some(library) = library else { continue };
                    let direct = matches!(dtype, WeightType::F16 | WeightType::BF16) && shift == 0 && k % 8 == 0;
                    let tiles = if direct {
                        1
                    } else {
                        rows.div_ceil((tile_bytes as usize / 2 / k.next_multiple_of(8)).min(rows))
                    };
                    assert_eq!(library.products(), tiles as u64, "{what}");
                    assert!(library.least_alignment() >= 16, "{what}");
                }
            }
        }
        println!("off by {:.2e} of a vector's length with f16, by {:.2e} with bf16", worst[0], worst[1]);
    });
}

/// The heuristic takes some microseconds on a host that has none to spare.
#[test]
fn cublaslt_chooses_once_for_a_shape() {
    with_library("cublaslt_chooses_once_for_a_shape", |gpu, library| {
        let Some(library) = library else { return };
        let (rows, k, m, shift) = (16, 256, 12, 0);
        let case = Case { dtype: WeightType::Q8_0, rows, k, m, shift, accumulate: false, tile_bytes: 1 << 20 };
        library.heuristics();
        let first = case.run(gpu).0;
        assert_eq!(library.heuristics(), 1);
        assert_eq!(case.run(gpu).0, first);
        assert_eq!(library.heuristics(), 0);
        Case { m: 13, ..case }.run(gpu);
        assert_eq!(library.heuristics(), 1);
    });
}

/// A call of `batches` products of a matrix with `m` vectors.
fn call(m: u32, batches: u32) -> (Call, Workspace) {
    let of = |address, ld: u32, rows: u32| Rows { address, ld, stride: u64::from(ld * rows) };
    let call = Call {
        half: Half::F16,
        batches,
        a: of(0x1000, 64, 16),
        a_is_turned: false,
        x: of(0x10_0000, 64, m),
        out: of(0x100_0000, 16, m),
        rows: 16,
        k: 64,
        m,
        accumulate: false,
    };
    (call, Workspace { address: 0, bytes: 0 })
}

/// A server meets prompts of every length.
#[test]
fn of_many_shapes_those_used_last_are_remembered() {
    with_library("of_many_shapes_those_used_last_are_remembered", |gpu, library| {
        let Some(library) = library else { return };
        let gemm = Gemm::open(&gpu.stream).unwrap();
        let has = |m| {
            let (call, workspace) = call(m, 1);
            assert!(gemm.has(&call, workspace), "{m} vectors");
        };
        let (shapes, left) = (SHAPES as u32, library.left());
        library.heuristics();
        (1..=shapes).for_each(has);
        let kept = library.left();
        assert!(kept > left);
        has(1);
        assert_eq!(library.heuristics(), SHAPES as u64, "the first one was forgotten");
        (shapes + 1..2 * shapes).for_each(has);
        assert_eq!((library.left(), library.heuristics()), (kept, SHAPES as u64 - 1));
        // The one of the first that was used again; the one behind it was not.
        has(1);
        assert_eq!(library.heuristics(), 0, "what was used last was forgotten");
        has(2);
        assert_eq!((library.left(), library.heuristics()), (kept, 1));
        drop(gemm);
        assert_eq!(library.left(), left - 1);
    });
}

/// What is logged as a warning while `body` runs.
fn warnings(body: impl FnOnce()) -> Vec<String> {
    let said = Arc::new(Mutex::new(Vec::new()));
    let subscriber = tracing_subscriber::fmt()
        .with_max_level(tracing::Level::WARN)
        .with_ansi(false)
        .with_writer(Mutex::new(Said(said.clone())))
        .finish();
    tracing::subscriber::with_default(subscriber, body);
    let said = std::mem::take(&mut *said.lock().unwrap());
    String::from_utf8(said).unwrap().lines().map(str::to_owned).collect()
}

struct Said(Arc<Mutex<Vec<u8>>>);

impl std::io::Write for Said {
    fn write(&mut self, text: &[u8]) -> std::io::Result<usize> {
        self.0.lock().unwrap().extend(text);
        Ok(text.len())
    }
    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

/// A library without products of batches is asked once for them, whatever their shapes are, and one warning says so. Of
/// other products it is asked for each shape.
#[test]
fn what_the_library_does_not_support_is_asked_for_once() {
    with_library("what_the_library_does_not_support_is_asked_for_once", |gpu, library| {
        let Some(library) = library else { return };
        let gemm = Gemm::open(&gpu.stream).unwrap();
        let has = |m, batches| {
            let (call, workspace) = call(m, batches);
            gemm.has(&call, workspace)
        };
        assert!(has(9, 4));
        library.heuristics();
        library.refuse(4);
        let said = warnings(|| assert!((10..20).all(|m| !has(m, 4) && !has(m, 2))));
        assert!(said.len() == 1 && said[0].contains("no products of several batches"), "{said:?}");
        assert_eq!(library.heuristics(), 1);
        // What it has had a kernel for, it has: a prompt whose attention has begun goes on.
        assert!(has(9, 4) && (10..20).all(|m| has(m, 1)));
        assert_eq!(library.heuristics(), 10);
        library.refuse(2);
        let said = warnings(|| assert!((20..23).all(|m| !has(m, 1) && !has(m, 1))));
        assert!(said.len() == 3 && said.iter().all(|line| line.contains("has no kernel for a product")), "{said:?}");
        assert_eq!(library.heuristics(), 3);
        library.refuse(0);
        assert!(!has(10, 4) && has(23, 1));
    });
}

#[test]
fn what_cublaslt_refuses_own_kernels_multiply() {
    with_library("what_cublaslt_refuses_own_kernels_multiply", |gpu, library| {
        let Some(library) = library else { return };
        let (rows, k, m, shift) = (24, 256, 10, 0);
        let case = Case { dtype: WeightType::Q4_K, rows, k, m, shift, accumulate: true, tile_bytes: 8 * 2 * 256 };
        library.products();
        library.refuse(2);
        let (got, want) = case.run(gpu);
        library.refuse(0);
        near("own kernels", &got, &want, 1e-5);
        assert_eq!(library.products(), 0);
        // A handle that cannot be made.
        library.refuse(1);
        assert!(Gemm::open(&gpu.stream).is_none());
        library.refuse(0);
    });
}
