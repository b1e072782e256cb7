//! Writes a synthetic model of any size.

use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Parser, ValueEnum};
use outcore_llm::synthetic::{Experts, Spec};
use outcore_llm::{Arch, Result, WeightType};

#[derive(Clone, Copy, Debug, ValueEnum)]
enum Format {
    Gguf,
    Safetensors,
}

/// Writes a model with seeded random weights: 1.2 GB in Q8_0 unless told otherwise.
#[derive(Debug, Parser)]
struct Args {
    /// The file (gguf) or the folder (safetensors) to write.
    out: PathBuf,
    #[arg(long, value_enum, default_value = "gguf")]
    format: Format,
    /// llama, qwen2, qwen3, qwen2moe, qwen3moe, olmoe, gpt-oss, gemma2, gemma3, phi3 or glm4moe.
    #[arg(long, default_value = "llama")]
    arch: String,
    /// F32, F16, BF16, or for gguf any of Q4_0 Q4_1 Q5_0 Q5_1 Q8_0 Q2_K Q3_K Q4_K Q5_K Q6_K IQ4_NL
    /// IQ4_XS MXFP4.
    #[arg(long, default_value = "Q8_0")]
    dtype: WeightType,
    #[arg(long, default_value_t = 22)]
    layers: u64,
    #[arg(long, default_value_t = 2048)]
    dim: u64,
    #[arg(long, default_value_t = 32)]
    heads: u64,
    #[arg(long, default_value_t = 4)]
    kv_heads: u64,
    /// Elements of a head; dim / heads unless given.
    #[arg(long)]
    head_dim: Option<u64>,
    #[arg(long, default_value_t = 5632)]
    ffn: u64,
    #[arg(long, default_value_t = 32000)]
    vocab: u64,
    #[arg(long, default_value_t = 2048)]
    context: u64,
    /// Use the embedding matrix as the output matrix.
    #[arg(long)]
    tied: bool,
    /// Number of safetensors files.
    #[arg(long, default_value_t = 1)]
    shards: usize,
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Experts of each layer, each as wide as --ffn says, of llama (gguf only), qwen2moe, qwen3moe, olmoe, gpt-oss and
    /// glm4moe.
    #[arg(long, requires = "experts_used")]
    experts: Option<u64>,
    /// Experts that a token uses.
    #[arg(long, requires = "experts")]
    experts_used: Option<u64>,
    /// In safetensors, the experts of a layer are in two tensors, as transformers 5 keeps them.
    #[arg(long, requires = "experts")]
    experts_fused: bool,
    /// Tokens of the window that some layers of gpt-oss, gemma2 and gemma3 have, and all of phi3.
    #[arg(long, default_value_t = 128)]
    window: u64,
}

fn main() -> ExitCode {
    match run(&Args::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // If standard error is closed there is nobody left to tell.
            let _ = writeln!(std::io::stderr(), "make_model: {}", error.in_full());
            ExitCode::FAILURE
        }
    }
}

fn run(args: &Args) -> Result<()> {
    let spec = Spec {
        arch: Arch::parse(&args.arch)?,
        dtype: args.dtype,
        layers: args.layers,
        dim: args.dim,
        heads: args.heads,
        kv_heads: args.kv_heads,
        head_dim: args.head_dim.unwrap_or(args.dim / args.heads.max(1)),
        ffn_dim: args.ffn,
        vocab: args.vocab,
        context: args.context,
        tied: args.tied,
        seed: args.seed,
        experts: args.experts.zip(args.experts_used).map(|(count, used)| Experts {
            count,
            used,
            fused: args.experts_fused,
        }),
        window: args.window,
    };
    match args.format {
        Format::Gguf => spec.write_gguf(&args.out)?,
        Format::Safetensors => spec.write_safetensors(&args.out, args.shards)?,
    }
    let header = outcore::format::open(&args.out)?;
    let bytes = header.tensors.iter().map(|tensor| tensor.len).sum::<u64>() as f64 / 1e9;
    println!("{}: {} tensors, {bytes:.2} GB of weights", args.out.display(), header.tensors.len());
    Ok(())
}
