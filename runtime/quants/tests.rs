//! Beside candle, which has most of these formats too, and against what ggml and the package `gguf` made.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use candle_core::quantized::ggml_file::qtensor_from_ggml;
use candle_core::quantized::{GgmlDType, QTensor};
use candle_core::{Device, Tensor};
use half::f16;
use twox_hash::XxHash3_64;

use super::{SUPER, dequantise, quantise};
use crate::WeightType;

/// Those that candle has.
const QUANTISED: [WeightType; 10] = [
    WeightType::Q4_0,
    WeightType::Q4_1,
    WeightType::Q5_0,
    WeightType::Q5_1,
    WeightType::Q8_0,
    WeightType::Q2_K,
    WeightType::Q3_K,
    WeightType::Q4_K,
    WeightType::Q5_K,
    WeightType::Q6_K,
];

/// Those that candle does not have.
const LISTED: [WeightType; 3] = [WeightType::IQ4_NL, WeightType::IQ4_XS, WeightType::MXFP4];

/// candle's name of the type, and where f16 numbers are in its blocks.
fn candles(dtype: WeightType) -> (GgmlDType, &'static [usize]) {
    match dtype {
        WeightType::Q4_0 => (GgmlDType::Q4_0, &[0]),
        WeightType::Q4_1 => (GgmlDType::Q4_1, &[0, 2]),
        WeightType::Q5_0 => (GgmlDType::Q5_0, &[0]),
        WeightType::Q5_1 => (GgmlDType::Q5_1, &[0, 2]),
        WeightType::Q8_0 => (GgmlDType::Q8_0, &[0]),
        WeightType::Q2_K => (GgmlDType::Q2K, &[80, 82]),
        WeightType::Q3_K => (GgmlDType::Q3K, &[108]),
        WeightType::Q4_K => (GgmlDType::Q4K, &[0, 2]),
        WeightType::Q5_K => (GgmlDType::Q5K, &[0, 2]),
        WeightType::Q6_K => (GgmlDType::Q6K, &[208]),
        WeightType::F32 | WeightType::F16 | WeightType::BF16 | WeightType::F8_E4M3 | WeightType::F8_E8M0 => {
            unreachable!("no blocks")
        }
        WeightType::IQ4_NL | WeightType::IQ4_XS | WeightType::MXFP4 => unreachable!("candle does not have it"),
    }
}

/// What candle makes of a row's bytes, which have to be aligned to two bytes: a vector's are.
fn candles_values(dtype: WeightType, row: &[u8]) -> Vec<f32> {
    let elements = row.len() / dtype.block_bytes() * dtype.block_elements();
    let tensor = qtensor_from_ggml(candles(dtype).0, row, vec![elements], &Device::Cpu).unwrap();
    tensor.dequantize(&Device::Cpu).unwrap().to_vec1().unwrap()
}

fn candles_bytes(dtype: WeightType, values: &[f32]) -> Vec<u8> {
    let values = Tensor::new(values, &Device::Cpu).unwrap();
    QTensor::quantize(&values, candles(dtype).0).unwrap().data().unwrap().into_owned()
}

struct Random(u32);

impl Random {
    fn next(&mut self) -> u32 {
        self.0 = self.0.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        self.0 >> 8
    }

    /// In -1..1.
    fn number(&mut self) -> f32 {
        self.next() as f32 / (1 << 23) as f32 - 1.0
    }

    fn block(&mut self, mut of: impl FnMut(usize, f32) -> f32) -> [f32; SUPER] {
        std::array::from_fn(|i| of(i, self.number()))
    }
}

/// Blocks like those of weights, and blocks at the borders of the rules.
fn ordinary() -> Vec<f32> {
    let mut random = Random(11);
    let mut blocks = Vec::new();
    for _ in 0..32 {
        blocks.push(random.block(|_, v| v));
        blocks.push(random.block(|_, v| v * v * v / 16.0));
        blocks.push(random.block(|_, v| v.abs()));
        blocks.push(random.block(|_, v| -v.abs() - 0.5));
        blocks.push(random.block(|_, v| v + 0.25));
        // Sub-blocks of very different sizes, some of them too small for a scale.
        blocks.push(random.block(|i, v| v / (1u32 << (i / 16)) as f32));
        // Few values, with many ties.
        blocks.push(random.block(|_, v| (v * 4.0).round() / 8.0));
        blocks.push(random.block(|_, v| v * 16384.0));
        // Scales are subnormal as f16, or zero.
        blocks.push(random.block(|_, v| v / 65536.0));
        blocks.push(random.block(|_, v| v * 1e-10));
    }
    blocks.extend([0.0, 1.0, -1.0, 0.3, -0.7, 1e-16].map(|v| [v; SUPER]));
    for (at, outlier) in [(0, 100.0), (77, -3.0), (255, 0.5)] {
        let lone = |i: usize, others: f32| if i == at { outlier } else { others };
        blocks.push(std::array::from_fn(|i| lone(i, 0.0)));
        blocks.push(random.block(|i, v| lone(i, v / 100.0)));
    }
    blocks.as_flattened().to_vec()
}

/// Numbers whose inverses are infinite.
fn tiny() -> Vec<f32> {
    let mut random = Random(12);
    let mut blocks = Vec::new();
    for _ in 0..8 {
        blocks.push(random.block(|_, v| v * 1e-37));
        blocks.push(random.block(|_, v| v * 1e-41));
    }
    blocks.extend([[f32::MIN_POSITIVE; SUPER], [f32::from_bits(1); SUPER], [-f32::from_bits(1); SUPER]]);
    blocks.as_flattened().to_vec()
}

fn quantised(dtype: WeightType, values: &[f32]) -> Vec<u8> {
    let mut bytes = Vec::new();
    quantise(dtype, values, &mut bytes);
    bytes
}

#[test]
fn values_are_candles_bit_by_bit() {
    let scales = [0.0, -0.0, 6e-8, -6e-8, 3.1e-5, 6.1e-5, -1e-3, 0.1, 1.0, -2.5, 40000.0, 65504.0, -65504.0];
    let scales = scales.map(f16::from_f32).into_iter().chain([f16::INFINITY, f16::NAN]).collect::<Vec<_>>();
    let mut random = Random(1);
    for dtype in QUANTISED {
        let (_, halves) = candles(dtype);
        let blocks = 3 * scales.len();
        let mut bytes: Vec<u8> = (0..blocks * dtype.block_bytes()).map(|_| random.next() as u8).collect();
        for (i, block) in bytes.chunks_exact_mut(dtype.block_bytes()).enumerate() {
            for (nth, at) in halves.iter().enumerate() {
                let scale = scales[(i + i / scales.len() * nth) % scales.len()];
                block[*at..at + 2].copy_from_slice(&scale.to_le_bytes());
            }
        }
        let want = candles_values(dtype, &bytes);
        for shift in 0..4 {
            let mut memory = vec![0; shift];
            memory.extend_from_slice(&bytes);
            let mut got = vec![f32::NAN; want.len()];
            dequantise(dtype, &memory[shift..], &mut got);
            for (i, (got, want)) in got.iter().zip(&want).enumerate() {
                // Which not-a-number is made of several is the compiler's choice.
                let same = got.to_bits() == want.to_bits() || got.is_nan() && want.is_nan();
                assert!(same, "{dtype}, element {i}: {got:e} and {want:e}");
            }
        }
    }
}

/// candle's rules for types of one level are ggml's.
#[test]
fn bytes_of_types_of_one_level_are_candles() {
    for dtype in QUANTISED.into_iter().filter(|dtype| dtype.block_elements() < SUPER) {
        for values in [ordinary(), tiny()] {
            assert!(quantised(dtype, &values) == candles_bytes(dtype, &values), "{dtype}");
        }
    }
}

/// candle has rules that ggml had before: `make_qkx1_quants` for Q2_K, Q4_K and Q5_K, fewer steps for Q6_K, and no
/// threshold below which numbers are zeros. Q3_K's rule is the same, but for the order in which a weight is multiplied,
/// and for halves, which candle rounds away from zero.
#[test]
fn errors_of_k_types_are_no_larger_than_candles() {
    for dtype in QUANTISED.into_iter().filter(|dtype| dtype.block_elements() == SUPER) {
        for (what, values) in [("ordinary", ordinary()), ("tiny", tiny())] {
            let mut ours = vec![0f32; values.len()];
            dequantise(dtype, &quantised(dtype, &values), &mut ours);
            let theirs = candles_values(dtype, &candles_bytes(dtype, &values));
            // Of each block in units of its largest number, so that all count.
            let error = |made: &[f32]| -> f64 {
                let blocks = values.as_chunks::<SUPER>().0.iter().zip(made.as_chunks::<SUPER>().0);
                let of = |(x, y): (&[f32; SUPER], &[f32; SUPER])| {
                    let largest = x.iter().fold(f32::MIN_POSITIVE, |a, b| a.max(b.abs()));
                    x.iter().zip(y).map(|(x, y)| f64::from((x - y) / largest).powi(2)).sum::<f64>()
                };
                blocks.map(of).sum()
            };
            let (ours, theirs) = (error(&ours), error(&theirs));
            assert!(ours <= theirs * (1.0 + 1e-6), "{dtype}, {what}: {ours} and {theirs}");
        }
    }
}

fn hex(text: &str) -> Vec<u8> {
    text.as_bytes().chunks(2).map(|two| u8::from_str_radix(std::str::from_utf8(two).unwrap(), 16).unwrap()).collect()
}

/// Blocks with every quant, and with scales of every kind.
#[test]
fn values_are_those_of_the_package_gguf_bit_by_bit() {
    let mut blocks: Vec<(WeightType, Vec<u8>, Vec<u32>)> = Vec::new();
    for line in include_str!("gguf.txt").lines().filter(|line| !line.starts_with('#')) {
        match (line.split_once(' ').unwrap(), blocks.last_mut()) {
            (("type", name), _) => blocks.push((name.parse().unwrap(), Vec::new(), Vec::new())),
            (("block", bytes), Some(last)) => last.1.extend(hex(bytes)),
            (("values", values), Some(last)) => {
                last.2.extend(values.split(' ').map(|bits| u32::from_str_radix(bits, 16).unwrap()));
            }
            _ => panic!("{line:?}"),
        }
    }
    for dtype in LISTED {
        assert!(blocks.iter().filter(|block| block.0 == dtype).count() >= 3, "{dtype}");
    }
    for (dtype, bytes, want) in blocks {
        assert_eq!((bytes.len(), want.len()), (dtype.block_bytes(), dtype.block_elements()), "{dtype}");
        let mut got = vec![f32::NAN; want.len()];
        dequantise(dtype, &bytes, &mut got);
        let got: Vec<u32> = got.iter().map(|value| value.to_bits()).collect();
        assert_eq!(got, want, "{dtype} {bytes:02x?}");
    }
}

/// XXH3 of the values, as little-endian `f32`, that ggml's `dequantize_row_*` of llama-cpp-python 0.3.36 makes of these
/// blocks. Those of gguf 0.19.0 are the same.
#[test]
fn values_of_random_blocks_are_ggmls() {
    for (dtype, hash) in LISTED.into_iter().zip([0x1c4d_f317_b474_eeb0, 0x5a51_8a8b_3aa8_ca7a, 0x9921_6cc1_a7df_9c0f]) {
        let mut random = Random(7);
        let mut bytes: Vec<u8> = (0..1024 * dtype.block_bytes()).map(|_| random.next() as u8).collect();
        if dtype != WeightType::MXFP4 {
            // Scales below two: none is infinite, or no number.
            bytes.chunks_exact_mut(dtype.block_bytes()).for_each(|block| block[1] &= 0xbf);
        }
        let mut values = vec![0f32; 1024 * dtype.block_elements()];
        dequantise(dtype, &bytes, &mut values);
        let values: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        assert_eq!(XxHash3_64::oneshot(&values), hash, "{dtype}");
    }
}

/// XXH3 of the bytes that ggml's `ggml_quantize_chunk` makes of `ordinary()`: that of llama-cpp-python 0.3.36, compiled
/// by gcc for x86-64 without FMA.
#[test]
fn bytes_are_ggmls() {
    let hashes = [
        0x92e4_dca1_5ee1_bebe,
        0x1217_ef29_4c11_1517,
        0x8da7_22de_d2cd_dbb1,
        0x009f_0552_a041_78a3,
        0x41e0_a726_d522_b057,
        0xac5c_0827_f01b_2a6d,
        0xe15b_8116_3e1d_e7f3,
        0x4e23_de6d_e6ec_2026,
        0xc0de_7c5a_6247_264b,
        0x0225_01c0_dc59_6a49,
        0x37e4_d2ab_c493_9636,
        0x1c34_e23c_a241_6643,
        0x1084_b121_cd56_ba2d,
        0x84ee_8642_586c_a780,
        0xe036_c422_a1da_3c3e,
        0xb8d1_1d58_8600_48d6,
    ];
    let values = ordinary();
    for (dtype, hash) in WeightType::ALL.into_iter().zip(hashes) {
        let bytes = quantised(dtype, &values);
        assert_eq!(XxHash3_64::oneshot(&bytes), hash, "{dtype}");
    }
}

/// Each row of `ggml.txt` in each type. Where scales are zero as f16, quants may be others, but values are the same.
#[test]
fn bytes_of_awkward_rows_are_ggmls() {
    struct Row {
        name: &'static str,
        values: Vec<f32>,
        bytes: Vec<(WeightType, Vec<u8>)>,
    }
    let mut rows: Vec<Row> = Vec::new();
    for line in include_str!("ggml.txt").lines().filter(|line| !line.starts_with('#')) {
        match (line.split_once(' ').unwrap(), rows.last_mut()) {
            (("row", name), _) => rows.push(Row { name, values: Vec::new(), bytes: Vec::new() }),
            (("values", bits), Some(row)) => {
                row.values.extend(bits.split(' ').map(|bits| f32::from_bits(u32::from_str_radix(bits, 16).unwrap())));
            }
            ((name, bytes), Some(row)) => {
                let dtype = name.parse().unwrap();
                match row.bytes.last_mut().filter(|last| last.0 == dtype) {
                    Some(last) => last.1.extend(hex(bytes)),
                    None => row.bytes.push((dtype, hex(bytes))),
                }
            }
            _ => panic!("{line:?}"),
        }
    }
    assert_eq!(rows.len(), 15);
    for Row { name, values, bytes } in rows {
        assert_eq!((values.len(), bytes.len()), (SUPER, WeightType::ALL.len() - 1), "{name}");
        for (dtype, want) in bytes {
            let got = quantised(dtype, &values);
            assert_eq!(got.len(), want.len(), "{name}, {dtype}");
            match name {
                // Powers of two that small wrap around in ggml.
                "subnormal" if dtype == WeightType::MXFP4 => {}
                "subnormal" => {
                    let decoded = |bytes: &[u8]| {
                        let mut values = vec![f32::NAN; SUPER];
                        dequantise(dtype, bytes, &mut values);
                        values
                    };
                    assert_eq!(decoded(&got), decoded(&want), "{name}, {dtype}");
                }
                _ => assert!(got == want, "{name}, {dtype}"),
            }
        }
    }
}

/// By the table of the OCP 8-bit Floating Point Specification.
#[test]
fn numbers_of_e4m3_are_those_of_the_specification() {
    let value = |byte: u8| {
        let mut out = [0f32];
        dequantise(WeightType::F8_E4M3, &[byte], &mut out);
        out[0]
    };
    let mut before = -1.0;
    for byte in 0..0x7Fu8 {
        let (exponent, fraction) = (i32::from(byte >> 3), f32::from(byte & 7) / 8.0);
        let wanted = if exponent == 0 { fraction * 2f32.powi(-6) } else { (1.0 + fraction) * 2f32.powi(exponent - 7) };
        assert_eq!((value(byte), value(byte | 0x80)), (wanted, -wanted), "{byte:#x}");
        assert!(wanted > before);
        before = wanted;
        let mut bytes = Vec::new();
        quantise(WeightType::F8_E4M3, &[wanted, -wanted, wanted * 1.001], &mut bytes);
        assert_eq!(bytes, [byte, byte | 0x80, byte]);
    }
    assert_eq!((value(0x7E), value(1), value(8)), (448.0, 0.001_953_125, 0.015_625));
    assert!(value(0x7F).is_nan() && value(0xFF).is_nan());
}

/// By the MX specification.
#[test]
fn numbers_of_e8m0_are_powers_of_two() {
    for byte in 0..=u8::MAX {
        let mut out = [0f32];
        dequantise(WeightType::F8_E8M0, &[byte], &mut out);
        if byte == u8::MAX {
            assert!(out[0].is_nan());
        } else {
            assert_eq!(f64::from(out[0]), 2f64.powi(i32::from(byte) - 127), "{byte}");
        }
        let mut bytes = Vec::new();
        quantise(WeightType::F8_E8M0, &out, &mut bytes);
        assert_eq!(bytes, [byte]);
    }
}
