//! Vector kernels against the portable ones.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use half::f16;
use outcore_llm::kernels::{self, ActKind, Acts, Fours, Level, Quantised};
use outcore_llm::{Pool, WeightType, quants};
use proptest::prelude::*;

/// Rows of blocks with every quant and every kind of scale, which what quantises may not make.
#[test]
fn every_level_agrees_on_any_blocks_of_types_with_a_table() {
    const K: usize = 512;
    let pool = Pool::new(1).unwrap();
    for dtype in [WeightType::IQ4_NL, WeightType::IQ4_XS, WeightType::MXFP4] {
        let blocks = K / dtype.block_elements();
        let mut bytes: Vec<u8> =
            numbers(240 * blocks * dtype.block_bytes(), 5).iter().map(|v| v.to_bits() as u8).collect();
        for (nth, block) in bytes.chunks_exact_mut(dtype.block_bytes()).enumerate() {
            // Far from where sums of products are infinite.
            if dtype == WeightType::MXFP4 {
                block[0] = (nth / blocks) as u8;
            } else {
                block[1] &= 0xbf;
            }
        }
        let mut weights = vec![0f32; 240 * K];
        quants::dequantise(dtype, &bytes, &mut weights);
        for m in [1, 4, 7, 16, 17] {
            let x = numbers(m * K, 6);
            let products = |level: Level| {
                let quantised = Quantised::new(level, &x, m, &pool);
                let mut out = vec![0f32; 240 * m];
                kernels::rows_dot(level, dtype, K, &bytes, Acts::Q8(&quantised), m, &mut out);
                out
            };
            let want = products(Level::Scalar);
            for level in [Level::Avx2, Level::Avx512] {
                let got = products(level);
                let rows = want.chunks_exact(m).zip(got.chunks_exact(m)).zip(weights.chunks_exact(K));
                for (r, ((want, got), weights)) in rows.enumerate() {
                    let most = weights.iter().fold(0f32, |most, w| most.max(w.abs()));
                    for (a, b) in want.iter().zip(got) {
                        assert!(
                            (a - b).abs() <= 1e-5 * K as f32 * most,
                            "{dtype} at {level:?}, row {r}: {a:e} and {b:e}"
                        );
                    }
                }
            }
        }
    }
}

/// The largest quants with the largest values, of one sign and of both: sums that 16 bits hold hold these.
#[test]
fn the_largest_products_of_all_types_are_right() {
    use WeightType::{IQ4_NL, IQ4_XS, MXFP4, Q4_0, Q4_1, Q4_K, Q5_K, Q6_K, Q8_0};
    const K: usize = 1024;
    const ROWS: usize = 5;
    let pool = Pool::new(1).unwrap();
    let one = f16::ONE.to_le_bytes();
    // Where the halves are that scale a block.
    let scales =
        [(Q4_0, 0..2), (Q4_1, 0..4), (Q8_0, 0..2), (Q4_K, 0..4), (Q5_K, 0..4), (Q6_K, 208..210), (IQ4_NL, 0..2)];
    for (dtype, scale) in scales.into_iter().chain([(IQ4_XS, 0..2), (MXFP4, 0..0)]) {
        for fill in [0xff, 0x00, 0x80, 0x7f, 0xf0, 0x77] {
            let mut bytes = vec![fill; ROWS * K / dtype.block_elements() * dtype.block_bytes()];
            for block in bytes.chunks_exact_mut(dtype.block_bytes()) {
                block[scale.clone()].chunks_exact_mut(2).for_each(|half| half.copy_from_slice(&one));
                if dtype == MXFP4 {
                    block[0] = 127;
                }
            }
            let mut weights = vec![0f32; ROWS * K];
            quants::dequantise(dtype, &bytes, &mut weights);
            for m in [1, 4, 9, 17] {
                let x: Vec<f32> = (0..m * K).map(|i| if i / K % 3 == 1 && i % 2 == 1 { 1.0 } else { -1.0 }).collect();
                for level in [Level::Scalar, Level::Avx2, Level::Avx512] {
                    let quantised = Quantised::new(level, &x, m, &pool);
                    let mut out = vec![0f32; ROWS * m];
                    kernels::rows_dot(level, dtype, K, &bytes, Acts::Q8(&quantised), m, &mut out);
                    for (r, out) in out.chunks_exact(m).enumerate() {
                        for (x, out) in x.chunks_exact(K).zip(out) {
                            let weights = &weights[r * K..(r + 1) * K];
                            let want: f64 = weights.iter().zip(x).map(|(w, x)| f64::from(*w) * f64::from(*x)).sum();
                            let most: f64 = weights.iter().map(|w| f64::from(w.abs())).sum();
                            let near = (f64::from(*out) - want).abs() <= 1e-4 * most;
                            assert!(near, "{dtype} of {fill:#x} at {level:?}, {m}: {out} and {want}");
                        }
                    }
                }
            }
        }
    }
}

fn numbers(len: usize, seed: u32) -> Vec<f32> {
    let mut state = seed;
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 8) as f32 / (1 << 23) as f32 - 1.0
    };
    (0..len).map(|_| next() + next() * next()).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]

    #[test]
    fn every_level_agrees_with_the_portable_kernel(
        dtype in prop::sample::select(WeightType::ALL.to_vec()),
        // Of 32 elements each, as far as the type's blocks allow.
        blocks in 1usize..40,
        // And of types without blocks.
        beyond in 0usize..32,
        rows in 1usize..11,
        m in 1usize..37,
        seed in any::<u32>(),
    ) {
        let wide = dtype.block_elements().max(32);
        let k = match dtype.block_elements() {
            1 => (blocks * 32 - beyond).max(1),
            _ if wide == 256 => blocks.div_ceil(8) * 256,
            _ => blocks * 32,
        };
        let pool = Pool::new(1).unwrap();
        let x = numbers(m * k, seed);
        let weights = numbers(rows * k, seed ^ 0x5555);
        let mut bytes = Vec::new();
        quants::quantise(dtype, &weights, &mut bytes);
        let products = |level: Level, rows: &[u8], x: &[f32]| {
            let m = x.len() / k;
            let (fours, quantised);
            let acts = match kernels::act_kind(dtype) {
                ActKind::Plain => {
                    fours = Fours::new(level, x, m, &pool);
                    Acts::Plain(x, &fours)
                }
                ActKind::Q8 => {
                    quantised = Quantised::new(level, x, m, &pool);
                    Acts::Q8(&quantised)
                }
            };
            let mut out = vec![0f32; rows.len() / (k / dtype.block_elements() * dtype.block_bytes()) * m];
            kernels::rows_dot(level, dtype, k, rows, acts, m, &mut out);
            out
        };
        let want = products(Level::Scalar, &bytes, &x);
        for level in [Level::Avx2, Level::Avx512] {
            let got = products(level, &bytes, &x);
            for (a, b) in want.iter().zip(&got) {
                // The sums have k terms of about 1; what differs is the order of additions.
                prop_assert!((a - b).abs() <= 1e-5 * k as f32, "{} at {:?}: {} and {}", dtype, level, a, b);
            }
            // Each row and each vector alone, and the vectors in parts: the same bits.
            let bits = |x: &[f32]| x.iter().map(|x| x.to_bits()).collect::<Vec<u32>>();
            for some in [1, 2, 5, 16, 17] {
                for first in (0..m).step_by(some) {
                    let end = m.min(first + some);
                    let part = products(level, &bytes, &x[first * k..end * k]);
                    for (part, whole) in part.chunks_exact(end - first).zip(got.chunks_exact(m)) {
                        prop_assert_eq!(bits(part), bits(&whole[first..end]), "{} in parts of {}", dtype, some);
                    }
                }
            }
            for (row, got) in bytes.chunks_exact(bytes.len() / rows).zip(got.chunks_exact(m)) {
                prop_assert_eq!(bits(&products(level, row, &x)), bits(got), "a row of {} alone", dtype);
            }
        }
    }

    #[test]
    fn attention_kernels_agree_with_plain_loops(len in 0usize..200, seed in any::<u32>(), a in -2f32..2.0) {
        let (x, y) = (numbers(len, seed), numbers(len, !seed));
        let halves: Vec<f16> = y.iter().map(|v| f16::from_f32(*v)).collect();
        let near = |a: f32, b: f32| (a - b).abs() <= 1e-4 * (1.0 + len as f32);
        for level in [Level::Scalar, Level::Avx2] {
            let plain: f32 = x.iter().zip(&y).map(|(a, b)| a * b).sum();
            prop_assert!(near(kernels::dot(level, &x, &y), plain));
            let plain: f32 = x.iter().zip(&halves).map(|(a, b)| a * b.to_f32()).sum();
            prop_assert!(near(kernels::dot_f16(level, &x, &halves), plain));
            let (mut full, mut half) = (x.clone(), x.clone());
            kernels::axpy(level, a, &y, &mut full);
            kernels::axpy_f16(level, a, &halves, &mut half);
            for i in 0..len {
                prop_assert!(near(full[i], x[i] + a * y[i]));
                prop_assert!(near(half[i], x[i] + a * halves[i].to_f32()));
            }
        }
    }
}
