//! Which tensors of a model change their type, and to which: as `llama-quantize --pure` chooses.

use std::cmp::Ordering;

use outcore::format::{ModelHeader, TensorHeader};
use outcore::{DType, Error, ErrorKind, Result};
use outcore_quants::WeightType;

/// Parts of the names of matrices that keep their type, besides norms: those that choose experts, and small ones that a
/// coarse type would harm. llama.cpp leaves out the same (`tensor_allows_quantization`).
const KEPT: [&str; 37] = [
    "_norm.weight",
    "ffn_gate_inp.weight",
    "ffn_gate_tid2eid.weight",
    "altup",
    "laurel",
    "per_layer_model_proj",
    "ssm_conv1d",
    "shortconv.conv.weight",
    "indexer.k_proj.weight",
    "indexer.q_proj.weight",
    "time_mix_first.weight",
    "time_mix_w0.weight",
    "time_mix_w1.weight",
    "time_mix_w2.weight",
    "time_mix_v0.weight",
    "time_mix_v1.weight",
    "time_mix_v2.weight",
    "time_mix_a0.weight",
    "time_mix_a1.weight",
    "time_mix_a2.weight",
    "time_mix_g1.weight",
    "time_mix_g2.weight",
    "time_mix_decay_w1.weight",
    "time_mix_decay_w2.weight",
    "time_mix_lerp_fused.weight",
    "attn_rel_b.weight",
    ".position_embd",
    "sam.pos_embd",
    "sam.neck.",
    "sam.net_",
    ".rel_pos",
    ".patch_embd",
    ".patch_merger",
    "a.rvq.codebook",
    "mm.a.code_embd",
    "position_embd.weight",
    "token_types.weight",
];

/// Whether a tensor is a matrix, or several, whose type may change.
fn is_matrix(tensor: &TensorHeader) -> bool {
    let extents = tensor.shape.iter().skip_while(|extent| **extent == 1).count();
    extents >= 2 && tensor.name.ends_with("weight") && !KEPT.iter().any(|part| tensor.name.contains(part))
}

/// The type that a matrix gets whose rows are not whole blocks of the type that was asked for: one of smaller blocks,
/// and F16 where those do not divide a row either.
fn for_rows(row: u64, asked: WeightType) -> WeightType {
    let fits = |to: WeightType| row.is_multiple_of(to.block_elements() as u64);
    let smaller = match asked {
        _ if fits(asked) => asked,
        WeightType::Q2_K | WeightType::Q3_K => WeightType::Q4_0,
        WeightType::Q4_K => WeightType::Q5_0,
        WeightType::Q5_K => WeightType::Q5_1,
        WeightType::Q6_K => WeightType::Q8_0,
        WeightType::IQ4_XS => WeightType::IQ4_NL,
        other => other,
    };
    if fits(smaller) { smaller } else { WeightType::F16 }
}

/// What llama.cpp calls a file whose matrices have this type: the number of `enum llama_ftype`.
pub fn file_type(asked: WeightType) -> Result<u32> {
    Ok(match asked {
        WeightType::F32 => 0,
        WeightType::F16 => 1,
        WeightType::Q4_0 => 2,
        WeightType::Q4_1 => 3,
        WeightType::Q8_0 => 7,
        WeightType::Q5_0 => 8,
        WeightType::Q5_1 => 9,
        WeightType::Q2_K => 10,
        // As for `llama-quantize`, the type's name stands for the mixture called M.
        WeightType::Q3_K => 12,
        WeightType::Q4_K => 15,
        WeightType::Q5_K => 17,
        WeightType::Q6_K => 18,
        WeightType::IQ4_NL => 25,
        WeightType::IQ4_XS => 30,
        WeightType::BF16 => 32,
        WeightType::MXFP4 => 38,
        other => return Err(Error::new(ErrorKind::Internal, format!("no file type is known for {other}"))),
    })
}

/// The type of weights that a tensor of a GGUF file has. Numbers of FP8 are none: their scales are in other tensors.
fn known(dtype: DType) -> Option<WeightType> {
    WeightType::of(dtype).filter(|one| WeightType::ALL.contains(one))
}

/// A tensor, and the type it gets.
#[derive(Clone, Copy, Debug)]
pub struct Chosen<'a> {
    pub tensor: &'a TensorHeader,
    pub to: DType,
    /// Whether it is a matrix of another type than was asked for, because of its rows.
    pub fallback: bool,
}

impl Chosen<'_> {
    /// The types it is converted from and to. If both are the same, its values are looked at, and its bytes copied.
    /// `None` if nothing is known of its values.
    pub fn types(&self) -> Option<(WeightType, WeightType)> {
        Some((known(self.tensor.dtype)?, known(self.to)?))
    }
}

/// The tensors in the order in which llama.cpp writes them: those of no layer, then layer by layer, each by name.
///
/// # Errors
/// [`Unsupported`](ErrorKind::Unsupported) for a matrix of a type that cannot be read.
pub fn choose(model: &ModelHeader, asked: WeightType) -> Result<Vec<Chosen<'_>>> {
    let mut chosen = Vec::with_capacity(model.tensors.len());
    for tensor in &model.tensors {
        let kept = Chosen { tensor, to: tensor.dtype, fallback: false };
        let row = tensor.shape.last().copied().unwrap_or(1);
        let to = for_rows(row, asked);
        if !is_matrix(tensor) {
            chosen.push(kept);
            continue;
        }
        let fallback = to != asked;
        if tensor.dtype == to.dtype() {
            chosen.push(Chosen { fallback, ..kept });
            continue;
        }
        if known(tensor.dtype).is_none() {
            let known: Vec<String> = WeightType::ALL.iter().map(ToString::to_string).collect();
            let what = format!("tensor {:?} is {}, which export cannot read", tensor.name, tensor.dtype);
            let remedy = format!("export from a file with other types ({})", known.join(", "));
            return Err(Error::new(ErrorKind::Unsupported, what).remedy(remedy));
        }
        chosen.push(Chosen { to: to.dtype(), fallback, ..kept });
    }
    chosen.sort_by(|a, b| by_layer(&a.tensor.name, &b.tensor.name));
    Ok(chosen)
}

fn by_layer(a: &str, b: &str) -> Ordering {
    let layer = |name: &str| -> Option<u32> { name.strip_prefix("blk.")?.split('.').next()?.parse().ok() };
    layer(a).cmp(&layer(b)).then_with(|| a.cmp(b))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tensor(name: &str, shape: &[u64]) -> TensorHeader {
        let len = 4 * shape.iter().product::<u64>();
        TensorHeader { name: name.into(), dtype: DType::F32, shape: shape.to_vec(), file: 0, offset: 0, len }
    }

    #[test]
    fn matrices_change_and_what_is_small_or_delicate_does_not() {
        for (name, shape) in [
            ("token_embd.weight", &[300, 64][..]),
            ("output.weight", &[300, 64]),
            ("blk.0.ffn_down_exps.weight", &[8, 64, 128]),
            ("blk.0.attn_q.weight", &[1, 2, 64]),
            // One number a row.
            ("blk.0.ffn_up.weight", &[64, 1]),
        ] {
            assert!(is_matrix(&tensor(name, shape)), "{name}");
        }
        for (name, shape) in [
            ("output_norm.weight", &[64][..]),
            ("blk.0.attn_q_norm.weight", &[8, 64]),
            ("blk.0.attn_q.bias", &[2, 64]),
            ("blk.0.ffn_gate_inp.weight", &[8, 64]),
            ("blk.0.ssm_conv1d.weight", &[64, 4]),
            ("position_embd.weight", &[512, 64]),
            ("rope_freqs.weight", &[64]),
            ("blk.0.attn_output.weight", &[1, 64]),
            ("blk.0.attn_output.scale", &[64, 64]),
        ] {
            assert!(!is_matrix(&tensor(name, shape)), "{name}");
        }
    }

    #[test]
    fn rows_that_are_not_whole_blocks_get_another_type() {
        use WeightType::{BF16, F16, F32, IQ4_NL, IQ4_XS, MXFP4, Q2_K, Q3_K, Q4_0, Q4_K, Q5_0, Q5_1, Q5_K, Q6_K, Q8_0};
        for (asked, of_32) in
            [(Q2_K, Q4_0), (Q3_K, Q4_0), (Q4_K, Q5_0), (Q5_K, Q5_1), (Q6_K, Q8_0), (IQ4_XS, IQ4_NL), (Q8_0, Q8_0)]
        {
            assert_eq!([512, 96, 100].map(|row| for_rows(row, asked)), [asked, of_32, F16], "{asked}");
        }
        assert_eq!([F32, F16, BF16, MXFP4].map(|asked| for_rows(100, asked)), [F32, F16, BF16, F16]);
    }

    #[test]
    fn every_type_has_a_number_of_files_of_it() {
        let mut numbers: Vec<u32> = WeightType::ALL.iter().filter_map(|asked| file_type(*asked).ok()).collect();
        numbers.sort_unstable();
        numbers.dedup();
        assert_eq!(numbers.len(), WeightType::ALL.len());
    }

    #[test]
    fn numbers_of_fp8_are_neither_read_nor_written() {
        assert_eq!((known(DType::F8_E4M3), known(DType::Q8_0)), (None, Some(WeightType::Q8_0)));
        assert!("f8_e4m3".parse::<WeightType>().is_err() && file_type(WeightType::F8_E4M3).is_err());
    }

    #[test]
    fn layers_are_in_order_of_their_numbers() {
        let mut names = ["blk.10.a", "output.weight", "blk.9.b", "blk.9.a", "a.blk.1.x", "blk.x.y"];
        names.sort_by(|a, b| by_layer(a, b));
        assert_eq!(names, ["a.blk.1.x", "blk.x.y", "output.weight", "blk.9.a", "blk.9.b", "blk.10.a"]);
    }
}
