//! `outcore kv replay`: replays requests to an inference server through a pool of keys and values.
//!
//! Both ways ask the pool's own tables for prefixes. In the simulation the pager moves no bytes ([`bare`]); on real
//! files a whole runtime does ([`real`]). One request is served after the other.

mod bare;
mod contents;
mod found;
mod real;
mod shelf;

use std::num::{NonZeroU32, NonZeroU64};
use std::path::PathBuf;
use std::thread;
use std::time::{Duration, Instant};

use clap::Args;
use outcore::format::{self, Metadata};
use outcore::{Bytes, DType, Error, ErrorKind, PageSize, Result};
use outcore_kv::{KvLayout, KvShape, TenantId, Token};
use outcore_lab::planning::Shape;
use outcore_lab::sim::{AnyPolicy, MachineModel, ServerRequest, ServerRequests};
use outcore_pager::random;

pub use self::found::Found;
use self::found::{Ended, Tally};
use super::arguments::page_size;
use super::bar::Bar;
use super::config::config_beside;
use super::named;

/// Most blocks of a pool, and most groups of blocks: the tables take up to 1 KiB of memory for each block, and a
/// pager's some 50 bytes for each group of it.
const BLOCKS_MOST: u64 = 1 << 23;
const GROUPS_MOST: u64 = 1 << 26;

/// The options of `outcore kv replay`.
#[derive(Debug, Args)]
pub struct Options {
    /// The trace, in the form of the Mooncake project: JSON lines with timestamp, input_length, output_length and
    /// hash_ids, one id a block of 512 tokens; may be packed by gzip or zstd
    #[arg(value_name = "TRACE")]
    trace: PathBuf,
    /// Move and check real bytes: the store of blocks and the scratch file are in this folder. Without it no bytes move
    #[arg(long, value_name = "FOLDER")]
    real: Option<PathBuf>,
    /// Memory for pages on the device
    #[arg(long, value_name = "SIZE", default_value = "1GiB")]
    device: Bytes,
    /// Memory for pages on the host
    #[arg(long, value_name = "SIZE", default_value = "2GiB")]
    host: Bytes,
    /// Room for the pool's blocks, in all tiers of the runtime; what memory does not hold is in the scratch file.
    /// Default: four times the memory
    #[arg(long, value_name = "SIZE")]
    pool: Option<Bytes>,
    /// Room of the store of blocks, which is below the pool; 0: there is none
    #[arg(long, value_name = "SIZE", default_value = "64GiB")]
    store: Bytes,
    /// The most requests that are replayed
    #[arg(long, value_name = "N")]
    limit: Option<u64>,
    /// How many tenants there are. A conversation is one tenant's, chosen by a hash of its second block, or its first
    #[arg(long, value_name = "N", default_value = "1")]
    tenants: NonZeroU64,
    /// Tokens a second that the model would compute, if their blocks were not found
    #[arg(long, value_name = "TOKENS", default_value_t = 10_000.0)]
    prefill_rate: f64,
    /// The model whose keys and values they are: a GGUF or safetensors file, of which only the header is read, or the
    /// name of a well-known model. Default: the shape of SmolLM2-135M
    #[arg(long, value_name = "MODEL", conflicts_with_all = ["layers", "kv_heads", "head_dim"])]
    model: Option<PathBuf>,
    /// Layers of the model
    #[arg(long, value_name = "N", default_value_t = 30)]
    layers: u32,
    /// Its heads of keys and values
    #[arg(long, value_name = "N", default_value_t = 3)]
    kv_heads: u32,
    /// Elements of a head
    #[arg(long, value_name = "N", default_value_t = 64)]
    head_dim: u32,
    /// The type of keys and values
    #[arg(long, value_name = "TYPE", default_value = "f16")]
    dtype: DType,
    /// Size of a page: a power of two from 4KiB to 1GiB
    #[arg(long, value_name = "SIZE", value_parser = page_size, default_value = "64KiB")]
    page_size: PageSize,
    /// The policy that says which pages leave the device: one of those of `outcore policies`
    #[arg(long, value_name = "NAME", default_value = "kv")]
    policy: AnyPolicy,
    /// Blocks that were found are put into the store each time that so many requests have ended, and at the end
    #[arg(long, value_name = "N", default_value = "16")]
    save_every: NonZeroU64,
    /// Each sequence is parked when its request has ended: it leaves the device, and all its blocks go to the store
    #[arg(long)]
    park: bool,
    /// With --real: wait for each request's timestamp. Otherwise one follows the other at once
    #[arg(long, requires = "real")]
    pace: bool,
    /// For the simulation: the machine whose link and disk say how long restoring takes, as for `outcore simulate`
    #[arg(long, value_name = "NAME|FILE", default_value = "h200", conflicts_with = "real")]
    machine: String,
    /// One JSON object instead of a table
    #[arg(long)]
    pub json: bool,
}

/// What both ways are told.
#[derive(Debug)]
struct Setup<'a> {
    options: &'a Options,
    layout: KvLayout,
    blocks: u32,
}

/// A request, as tokens.
#[derive(Debug)]
struct Asked<'a> {
    line: u64,
    tenant: TenantId,
    prompt: &'a [Token],
    answer: &'a [Token],
}

/// What was found for a request, by [tier](found::TIERS).
#[derive(Clone, Copy, Debug, Default)]
struct Served {
    /// Blocks. A block is where the slowest of its pages is.
    blocks: [u64; 4],
    /// Bytes that had to come from there.
    bytes: [u64; 4],
    /// Until all of them were on the device.
    restore: Duration,
}

/// A way to serve requests.
trait Server {
    fn serve(&mut self, asked: &Asked<'_>) -> Result<Served>;
    /// Puts blocks that were found into the store.
    fn save(&mut self) -> Result<()>;
    fn end(self: Box<Self>) -> Result<Ended>;
}

/// # Errors
/// Of reading the trace, of the sizes, and of the runtime and the store. A request that is larger than the pool or the
/// device is none: it is counted.
pub fn run(options: &Options) -> Result<Found> {
    let rate = options.prefill_rate;
    if !(rate.is_finite() && rate > 0.0) {
        return Err(wrong(format!("--prefill-rate {rate} computes nothing"), "give tokens a second, such as 10000"));
    }
    let requests = ServerRequests::open(&options.trace)?;
    let layout = KvLayout::new(shape(options)?, options.page_size)?;
    let setup = Setup { options, blocks: blocks(options, &layout)?, layout };
    let mut server: Box<dyn Server> = match &options.real {
        Some(folder) => Box::new(real::Real::open(&setup, folder)?),
        None => Box::new(bare::Bare::open(&setup, MachineModel::find(&options.machine)?)?),
    };
    let (mut tally, bar, begin) = (Tally::new(&setup), Bar::counting("replaying"), Instant::now());
    let (mut first, most) = (None, options.limit.unwrap_or(u64::MAX));
    let (mut prompt, mut answer) = (Vec::new(), Vec::new());
    for request in requests {
        if tally.requests == most {
            break;
        }
        let request = request?;
        tally.requests += 1;
        bar.at(tally.asked());
        if let Some(why) = setup.too_large(&request) {
            tally.too_large(&request, why);
            continue;
        }
        if options.pace {
            let first = *first.get_or_insert(request.timestamp);
            let due = Duration::from_millis(request.timestamp.saturating_sub(first));
            thread::sleep(due.saturating_sub(begin.elapsed()));
        }
        prompt_of(&request, &mut prompt);
        answer_of(&request, &mut answer);
        let tenant = tenant_of(&request, options.tenants);
        let asked = Asked { line: request.line, tenant, prompt: &prompt, answer: &answer };
        match server.serve(&asked) {
            Ok(served) => tally.served(prompt.len() as u64, &served),
            Err(error) if error.kind() == ErrorKind::BudgetTooSmall => tally.too_large(&request, error.to_string()),
            Err(error) => return Err(error.context(format!("the request of line {}", request.line))),
        }
        if tally.requests.is_multiple_of(options.save_every.get()) {
            server.save()?;
        }
    }
    if tally.requests == 0 {
        let what = format!("the trace {} has no request", options.trace.display());
        let remedy = if most == 0 { "give --limit at least 1" } else { "give a file with at least one line" };
        return Err(Error::new(ErrorKind::Format, what).remedy(remedy));
    }
    server.save()?;
    let took = begin.elapsed();
    Ok(tally.found(&setup, server.end()?, took))
}

fn wrong(message: String, remedy: impl Into<String>) -> Error {
    Error::new(ErrorKind::InvalidArgument, message).remedy(remedy)
}

fn shape(options: &Options) -> Result<KvShape> {
    let Some(path) = &options.model else {
        return KvShape::new(options.layers, options.kv_heads, options.head_dim, options.dtype);
    };
    let shape = match named::shape(path, None)? {
        Some(shape) => shape,
        None => {
            let header = format::open(path)?;
            let config = match (&header.metadata, header.files.first()) {
                (Metadata::Safetensors(_), Some(file)) => Some(config_beside(&file.path)?),
                _ => None,
            };
            Shape::of(&header, config.as_deref()).map_err(|error| error.context(path.display()))?
        }
    };
    if shape.key_dim != shape.value_dim {
        let what =
            format!("{} has keys of {} elements and values of {}", path.display(), shape.key_dim, shape.value_dim);
        return Err(wrong(
            what,
            "give --layers, --kv-heads and --head-dim instead, of a model in which both are alike",
        ));
    }
    let [layers, heads, head_dim] =
        [shape.layers, shape.kv_heads, shape.key_dim].map(|count| u32::try_from(count).unwrap_or(u32::MAX));
    KvShape::new(layers, heads, head_dim, options.dtype)
}

/// Blocks of the pool.
fn blocks(options: &Options, layout: &KvLayout) -> Result<u32> {
    let Options { device, host, pool, .. } = options;
    let memory = device.get().saturating_add(host.get());
    let room = pool.map_or(memory.saturating_mul(4), Bytes::get);
    let (groups, block) = (u64::from(layout.groups()), layout.block_room().get() * u64::from(layout.groups()));
    let (blocks, room) = (room / block, Bytes::new(room));
    if blocks == 0 {
        let what = format!("--pool {room} holds no block: one takes {}", Bytes::new(block));
        return Err(Error::new(ErrorKind::BudgetTooSmall, what).remedy("give more, or a smaller model or page"));
    }
    let most = BLOCKS_MOST.min(GROUPS_MOST / groups);
    if blocks > most {
        let what =
            format!("--pool {room} is {blocks} blocks of {groups} groups of layers: at most {most} are replayed");
        return Err(wrong(what, format!("give --pool {} or less, or larger pages", Bytes::new(most * block))));
    }
    Ok(blocks as u32)
}

impl Setup<'_> {
    /// Frames of the device that a group of a block takes, and bytes of them.
    fn block_pages(&self) -> u64 {
        self.layout.pages()
    }

    /// Bytes of a block in a store.
    fn stored(&self) -> u64 {
        self.layout.block_bytes().get() * u64::from(self.layout.groups())
    }

    /// Why the pool or the device can never hold what a request needs. This is so before anything is allocated for it.
    fn too_large(&self, request: &ServerRequest) -> Option<String> {
        let tokens = request.input_length.saturating_add(request.output_length);
        let needs = tokens.div_ceil(u64::from(self.layout.block_tokens()));
        if needs > u64::from(self.blocks) {
            let has = self.blocks;
            return Some(format!("{tokens} tokens take {needs} blocks, and the pool has {has} (raise --pool)"));
        }
        let (room, device) = (needs * self.layout.block_room().get(), self.options.device);
        let frames = device.get() / self.layout.page_size().bytes();
        (needs * self.block_pages() > frames).then(|| {
            let room = Bytes::new(room);
            format!("a group of layers of {tokens} tokens takes {room}, and the device has {device} (raise --device)")
        })
    }
}

/// The token at this place of a block. Tokens of two ids are alike by chance only.
fn token(id: u64, place: u64) -> Token {
    Token::new(random::nth(random::nth(id) ^ place) as u32)
}

fn prompt_of(request: &ServerRequest, into: &mut Vec<Token>) {
    into.clear();
    for (id, start) in request.hash_ids.iter().zip((0..).step_by(ServerRequest::BLOCK_TOKENS as usize)) {
        let count = (request.input_length - start).min(ServerRequest::BLOCK_TOKENS);
        into.extend((0..count).map(|place| token(*id, place)));
    }
}

/// Tokens that no other request has.
fn answer_of(request: &ServerRequest, into: &mut Vec<Token>) {
    into.clear();
    // No id of a trace comes out of this but by chance.
    let id = random::nth(!request.line);
    into.extend((0..request.output_length).map(|place| token(id, place)));
}

/// All conversations begin with the same block, that of the system prompt. The second one tells them apart.
fn tenant_of(request: &ServerRequest, tenants: NonZeroU64) -> TenantId {
    let id = request.hash_ids.get(1).or(request.hash_ids.first()).copied().unwrap_or(0);
    TenantId::new(random::nth(id) % tenants)
}

/// A pager's frames for so many bytes.
fn frames(bytes: Bytes, each: u64) -> Result<u32> {
    u32::try_from(bytes.get() / each)
        .map_err(|_| wrong(format!("{bytes} hold more than 2^32 pages"), "choose larger pages, or less memory"))
}

/// The frames of the device, of which there must be one.
fn device_frames(bytes: Bytes, each: u64) -> Result<NonZeroU32> {
    NonZeroU32::new(frames(bytes, each)?).ok_or_else(|| {
        let what = format!("--device {bytes} holds no group of a block, which takes {}", Bytes::new(each));
        Error::new(ErrorKind::BudgetTooSmall, what).remedy("give more, or choose smaller pages")
    })
}
