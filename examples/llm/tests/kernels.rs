//! Vector kernels against the portable ones, and both against candle's decoding of the same bytes.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use half::f16;
use outcore_llm::WeightType;
use outcore_llm::kernels::{self, ActKind, Acts, BLOCK, Level, Q8Block};
use proptest::prelude::*;

fn quantised(x: &[f32]) -> Vec<Q8Block> {
    let mut blocks = vec![Q8Block { scale: 0.0, sum: 0.0, q: [0; BLOCK] }; x.len() / BLOCK];
    kernels::quantise(x, &mut blocks);
    blocks
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
        blocks in 1usize..4,
        rows in 1usize..11,
        m in 1usize..10,
        seed in any::<u32>(),
    ) {
        let k = blocks * 256;
        let x = numbers(m * k, seed);
        let weights = numbers(rows * k, seed ^ 0x5555);
        let mut bytes = Vec::new();
        kernels::encode(dtype, &weights, &mut bytes);
        let q8 = quantised(&x);
        let acts = match kernels::act_kind(dtype) {
            ActKind::Plain => Acts::Plain(&x),
            ActKind::Q8 => Acts::Q8(&q8),
        };
        let mut want = vec![0f32; rows * m];
        kernels::rows_dot(Level::Scalar, dtype, k, &bytes, acts, m, &mut want);
        for level in [Level::Avx2, Level::Vnni] {
            let mut got = vec![0f32; rows * m];
            kernels::rows_dot(level, dtype, k, &bytes, acts, m, &mut got);
            for (a, b) in want.iter().zip(&got) {
                // The sums have k terms of about 1; what differs is the order of additions.
                prop_assert!((a - b).abs() <= 1e-5 * k as f32, "{} at {:?}: {} and {}", dtype, level, a, b);
            }
            // Each row and each vector alone: the same bits.
            let row_bytes = bytes.len() / rows;
            for (r, row) in bytes.chunks_exact(row_bytes).enumerate() {
                for j in 0..m {
                    let alone = match acts {
                        Acts::Plain(a) => Acts::Plain(&a[j * k..(j + 1) * k]),
                        Acts::Q8(a) => Acts::Q8(&a[j * k / BLOCK..(j + 1) * k / BLOCK]),
                    };
                    let mut one = [0f32];
                    kernels::rows_dot(level, dtype, k, row, alone, 1, &mut one);
                    prop_assert_eq!(one[0].to_bits(), got[r * m + j].to_bits());
                }
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

#[test]
fn own_decoding_equals_candles() {
    use candle_core::quantized::k_quants::{BlockQ4_0, BlockQ4_1, BlockQ4K, BlockQ5K, BlockQ6K, BlockQ8_0, GgmlType};

    fn check<T: GgmlType>(dtype: WeightType) {
        let values = numbers(1024, 3);
        let mut blocks = vec![T::zeros(); values.len() / T::BLCK_SIZE];
        T::from_float(&values, &mut blocks);
        let mut want = vec![0f32; values.len()];
        T::to_float(&blocks, &mut want);
        let mut bytes = Vec::new();
        kernels::encode(dtype, &values, &mut bytes);
        let mut got = vec![0f32; values.len()];
        kernels::dequantise(dtype, &bytes, &mut got);
        for (a, b) in want.iter().zip(&got) {
            assert!((a - b).abs() <= 1e-6, "{dtype}: {a} and {b}");
        }
    }

    check::<BlockQ4_0>(WeightType::Q4_0);
    check::<BlockQ4_1>(WeightType::Q4_1);
    check::<BlockQ8_0>(WeightType::Q8_0);
    check::<BlockQ4K>(WeightType::Q4_K);
    check::<BlockQ5K>(WeightType::Q5_K);
    check::<BlockQ6K>(WeightType::Q6_K);
}
