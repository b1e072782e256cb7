//! The command line.

use std::net::{IpAddr, Ipv4Addr};
use std::path::PathBuf;

use axum::http::uri::Authority;
use axum::http::{HeaderValue, Uri};
use clap::{Parser, ValueEnum};
use outcore::store::IoBackend;
use outcore::{Bytes, PolicyKind};

use crate::engine::{Pooling, Preempt};

/// What becomes of requests with fields that nobody knows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum UnknownFields {
    /// They have no effect; the log has each name once.
    #[default]
    Ignore,
    /// They get the status 400.
    Refuse,
}

fn number(text: &str, least: f32, most: f32) -> Result<f32, String> {
    let number = text.parse().ok().filter(|number| (least..=most).contains(number));
    number.ok_or_else(|| format!("a number between {least} and {most} is wanted"))
}

fn within<const LEAST: u8, const MOST: u8>(text: &str) -> Result<f32, String> {
    number(text, LEAST.into(), MOST.into())
}

/// An origin as browsers send it (RFC 6454): scheme, host, and a port if it is not the scheme's.
fn origin(text: &str) -> Result<HeaderValue, String> {
    let is_origin = |uri: &Uri| {
        let parts = uri.scheme_str().zip(uri.authority());
        parts.is_some_and(|(scheme, authority)| text == format!("{scheme}://{authority}") && !text.contains('@'))
    };
    if text != "*" && !text.parse().is_ok_and(|uri| is_origin(&uri)) {
        return Err("give an origin such as https://chat.example or http://localhost:3000, without a path, or *".into());
    }
    HeaderValue::from_str(text).map_err(|error| error.to_string())
}

fn host_name(text: &str) -> Result<String, String> {
    if !text.parse().is_ok_and(|authority: Authority| authority.host() == text) {
        return Err("give a name such as chat.example, without a scheme and a port".into());
    }
    Ok(text.to_owned())
}

fn repetition(text: &str) -> Result<f32, String> {
    number(text, 0.01, 100.0)
}

/// Serves a model, larger than memory if need be, to many clients at once: the API of OpenAI's completions, chat
/// completions and embeddings.
#[derive(Clone, Debug, Parser)]
#[command(version)]
pub struct Args {
    /// A .gguf file (any one of a split model), or a folder with safetensors files and config.json.
    #[arg(long)]
    pub model: PathBuf,
    /// What clients call the model. Default: the file's name without its ending.
    #[arg(long)]
    pub name: Option<String>,
    /// The port; 0 takes any free one, which is printed.
    #[arg(long, default_value_t = 8080)]
    pub port: u16,
    /// The address to listen at. Any but a loopback address needs --token-file or --tenants.
    #[arg(long, default_value_t = IpAddr::V4(Ipv4Addr::LOCALHOST))]
    pub host: IpAddr,
    /// Most memory the whole process may take. Default: the limit of the control group or the machine, less headroom.
    #[arg(long)]
    pub memory: Option<Bytes>,
    /// How much of it keys and values of active answers may take. Default: what the weights leave, but at least half of
    /// the pages.
    #[arg(long)]
    pub kv_memory: Option<Bytes>,
    /// Keys and values kept in all tiers together, parked and cached ones included; the room is taken on disk.
    #[arg(long, default_value = "2GiB")]
    pub kv_space: Bytes,
    /// A folder where keys and values are kept when the server stops: the next start goes on with them.
    #[arg(long)]
    pub kv_store: Option<PathBuf>,
    /// A file with the bearer token that clients have to send.
    #[arg(long, conflicts_with = "tenants")]
    pub token_file: Option<PathBuf>,
    /// A JSON file with tenants, their bearer tokens and quotas.
    #[arg(long)]
    pub tenants: Option<PathBuf>,
    /// Most answers that are written at a time. Default: 64, and fewer where their logits would take a sixteenth of the
    /// memory or more.
    #[arg(long, value_parser = clap::value_parser!(u16).range(1..=1024))]
    pub concurrency: Option<u16>,
    /// Most answers that wait beyond these; more get the status 429.
    #[arg(long, default_value_t = 256)]
    pub queue: u16,
    /// Longest sequence, prompt and answer together. Default: the model's context.
    #[arg(long)]
    pub context: Option<usize>,
    /// Most tokens of an answer. Default: what the context leaves.
    #[arg(long, visible_alias = "tokens")]
    pub max_tokens: Option<usize>,
    /// Largest body of a request; less, where the memory for requests has no room for one of that size.
    #[arg(long, default_value = "4MiB")]
    pub max_body: Bytes,
    /// Most open connections.
    #[arg(long, default_value_t = 1024)]
    pub connections: u16,
    /// Seconds after which an answer ends, with what was written by then.
    #[arg(long, default_value_t = 600, value_parser = clap::value_parser!(u64).range(1..=86400))]
    pub timeout: u64,
    /// Seconds that answers may still take when the server is told to stop; then they are parked.
    #[arg(long, default_value_t = 10)]
    pub drain: u16,
    /// Temperature of requests that name none. Default of this and the next four: what the model says, and what it
    /// leaves out is off; for a model that says nothing 0.8, 40, 0.95, 0.05 and 1.
    #[arg(long, value_parser = within::<0, 2>)]
    pub temperature: Option<f32>,
    /// Of how many of the likeliest tokens one is drawn; 0 is all.
    #[arg(long)]
    pub top_k: Option<usize>,
    /// Which part of all probabilities the tokens have of which one is drawn.
    #[arg(long, value_parser = within::<0, 1>)]
    pub top_p: Option<f32>,
    /// How likely a token is at least, as a part of the likeliest one.
    #[arg(long, value_parser = within::<0, 1>)]
    pub min_p: Option<f32>,
    /// How much less likely a token becomes that the prompt or the answer has.
    #[arg(long, value_parser = repetition)]
    pub repetition_penalty: Option<f32>,
    /// Which hidden states become an embedding: that of the last token, the mean of all, or that of the first (cls).
    /// Default: what the model says; last for a model that says nothing.
    #[arg(long, value_enum)]
    pub pooling: Option<Pooling>,
    /// What becomes of requests with fields that nobody knows: ignore, which logs each name once, or refuse.
    #[arg(long, value_enum, default_value_t)]
    pub unknown_fields: UnknownFields,
    /// A name by which browsers may reach the server without a token, besides localhost; may be given several times.
    #[arg(long, value_name = "NAME", value_parser = host_name)]
    pub allow_host: Vec<String>,
    /// An origin, such as `https://chat.example`, whose web pages may use the server; `*` is any. May be given several
    /// times.
    #[arg(long, value_name = "ORIGIN", value_parser = origin)]
    pub allow_origin: Vec<HeaderValue>,
    /// Drafts what follows by looking up the prompt, where that pays: the same answers, in fewer passes.
    #[arg(long)]
    pub speculate: bool,
    /// A small model with the same vocabulary that drafts what looking up does not find: a .gguf file or a folder, as
    /// for --model. Turns --speculate on. Its weights stay in memory, which is part of --memory.
    #[arg(long)]
    pub draft_model: Option<PathBuf>,
    /// With --draft-model: most tokens that it drafts at a time, up to 16.
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u8).range(1..=16))]
    pub draft_tokens: u8,
    /// What becomes of the keys and values of an answer that has to make room: park, recompute, or auto, which takes
    /// what costs less by what was measured.
    #[arg(long, value_enum, default_value_t)]
    pub preempt: Preempt,
    /// Threads that compute; 0 means one a core.
    #[arg(long, default_value_t = 0)]
    pub threads: usize,
    /// Bytes of a page: a power of two. Default: what weights want, at most a 32nd of --kv-space, and at most 512KiB
    /// where all weights have room.
    #[arg(long)]
    pub page_size: Option<Bytes>,
    /// Which page goes when a frame is needed: see `generate --help`. Default: plan; model for a mixture of experts.
    #[arg(long)]
    pub policy: Option<PolicyKind>,
    /// How files are read: auto, io_uring, threads or buffered.
    #[arg(long, default_value = "auto")]
    pub io: IoBackend,
    /// A file for the order in which pages are used, which `outcore policies` reads. It is complete when the server has
    /// stopped.
    #[arg(long)]
    pub capture: Option<PathBuf>,
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::Args;

    fn parsed(option: &str, value: &str) -> Option<Args> {
        Args::try_parse_from(["serve", "--model", "m", "--memory", "1GiB", option, value]).ok()
    }

    #[test]
    fn an_answers_length_has_two_names() {
        for option in ["--tokens", "--max-tokens"] {
            assert_eq!(parsed(option, "7").and_then(|args| args.max_tokens), Some(7), "{option}");
        }
    }

    #[test]
    fn hosts_are_names_without_ports() {
        for name in ["chat.example", "10.0.0.7", "[fe80::1]"] {
            assert_eq!(parsed("--allow-host", name).map(|args| args.allow_host), Some(vec![name.to_owned()]));
        }
        for name in ["", "chat.example:8080", "http://chat.example", "a@chat.example", "chat.example/"] {
            assert!(parsed("--allow-host", name).is_none(), "{name}");
        }
    }
}
