//! `outcore plan`: says how much memory a job needs, how much of it would move, how fast that can be, and what would
//! help. Reads headers only.

mod found;
mod text;

use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::Args;
use outcore::format::{self, Metadata};
use outcore::store::QueueDepth;
use outcore::{Bytes, DType, Error, ErrorKind, Result};
use outcore_lab::planning::{
    self, Bandwidth, Checkpointing, Compute, Given, GivenExperts, Job, KvType, Optimizer, Parameters, Resources, Shape,
    Work,
};
use outcore_lab::sim::MachineModel;

use super::config::config_beside;
use super::here::{self, Here, Source};
use super::named;
use found::{Model, Plan, Supply};

/// The options of `outcore plan`.
#[derive(Debug, Args)]
pub struct Options {
    /// A GGUF or safetensors file, one file of a split model, an index.json, or a folder with one of them; safetensors
    /// need their config.json beside them. Or the name of a well-known model, such as llama-3.3-70b
    #[arg(value_name = "MODEL", required_unless_present = "params")]
    model: Option<PathBuf>,
    /// Without a file or a name: the model's number of parameters, such as 70B
    #[arg(long, value_name = "N", conflicts_with = "model", allow_hyphen_values = true)]
    params: Option<Parameters>,
    /// Without a file: the type of the weights, such as bf16 (the default), q8_0 or q4_k
    #[arg(long, value_name = "TYPE")]
    dtype: Option<DType>,
    /// Without a file: the number of layers. This and the sizes below are estimated where they are left out
    #[arg(long, value_name = "N", conflicts_with = "model", requires = "params")]
    #[arg(value_parser = count, allow_hyphen_values = true)]
    layers: Option<u64>,
    /// Without a file: width of the residual stream, in elements
    #[arg(long, value_name = "N", conflicts_with = "model", requires = "params")]
    #[arg(value_parser = count, allow_hyphen_values = true)]
    hidden: Option<u64>,
    /// Without a file: the number of query heads
    #[arg(long, value_name = "N", conflicts_with = "model", requires = "params")]
    #[arg(value_parser = count, allow_hyphen_values = true)]
    heads: Option<u64>,
    /// Without a file: the number of heads of keys and values
    #[arg(long, value_name = "N", conflicts_with = "model", requires = "params")]
    #[arg(value_parser = count, allow_hyphen_values = true)]
    kv_heads: Option<u64>,
    /// Without a file: width of the feed-forward layer, in elements
    #[arg(long, value_name = "N", conflicts_with = "model", requires = "params")]
    #[arg(value_parser = count, allow_hyphen_values = true)]
    ffn: Option<u64>,
    /// Without a file: the number of token ids (the vocabulary)
    #[arg(long, value_name = "N", conflicts_with = "model", requires = "params")]
    #[arg(value_parser = count, allow_hyphen_values = true)]
    vocab: Option<u64>,
    /// Without a file: the feed-forward layer has a gate (SwiGLU), as Llama's
    #[arg(long, conflicts_with = "model", requires = "params")]
    gated: bool,
    /// Without a file: the number of experts of each layer; their weights are among the parameters
    #[arg(long, value_name = "N", conflicts_with = "model", requires = "params")]
    #[arg(value_parser = count, allow_hyphen_values = true)]
    experts: Option<u64>,
    /// Without a file: how many of a layer's experts a token uses. Default: all
    #[arg(long, value_name = "N", conflicts_with = "model", requires = "experts")]
    #[arg(value_parser = count, allow_hyphen_values = true)]
    active_experts: Option<u64>,
    /// Without a file: width of an expert's feed-forward layer, in elements. Default: --ffn, or what the parameters
    /// leave
    #[arg(long, value_name = "N", conflicts_with = "model", requires = "experts")]
    #[arg(value_parser = count, allow_hyphen_values = true)]
    expert_ffn: Option<u64>,
    /// The machine, as in `outcore simulate`: h200, rtx4090, gh200, dgx-spark, laptop, dgx-h200, or a file that
    /// describes one (docs/simulator.md). It supplies what the options below leave out: memory, bandwidths and the
    /// speed of computing. Default: this machine, as measured now, unless --device-memory and --disk are both given
    #[arg(long, value_name = "NAME|FILE")]
    machine: Option<String>,
    /// The device's memory, such as 24GiB: a GPU's, or this process's where there is none. Default: the machine's; of
    /// this machine, what is free
    #[arg(long, value_name = "SIZE", value_parser = some_memory, allow_hyphen_values = true)]
    device_memory: Option<Bytes>,
    /// The host's memory beside the device's; 0 for no host tier. Default: the machine's, or 0
    #[arg(long, value_name = "SIZE", allow_hyphen_values = true)]
    host_memory: Option<Bytes>,
    /// Bandwidth of the disk for reads and for writes, such as 2GB/s. Default: the machine's; of this machine, that of
    /// the model's disk, or of the current folder's
    #[arg(long, value_name = "BANDWIDTH", allow_hyphen_values = true)]
    disk: Option<Bandwidth>,
    /// Bandwidth of the link between host and GPU in each direction, such as 25GB/s; none where the device is the host
    #[arg(long, value_name = "BANDWIDTH", allow_hyphen_values = true)]
    link: Option<Bandwidth>,
    /// Time of a pass or a step with everything resident, such as 80ms. Default: the least time at the machine's rates,
    /// or not known
    #[arg(long, value_name = "TIME", value_parser = seconds, allow_hyphen_values = true)]
    compute: Option<f64>,
    /// Tokens of a sequence. Default: 4096, or the model's own context if that is less
    #[arg(long, value_name = "N", value_parser = count, allow_hyphen_values = true)]
    context: Option<u64>,
    /// Sequences at a time
    #[arg(long, value_name = "N", value_parser = count, default_value = "1", allow_hyphen_values = true)]
    batch: u64,
    /// Generate text (the default)
    #[arg(long, conflicts_with = "train")]
    infer: bool,
    /// Train all weights
    #[arg(long)]
    train: bool,
    /// Type in which keys and values are kept: f32, f16 or q8
    #[arg(long, value_name = "TYPE", default_value = "f16", conflicts_with = "train")]
    kv: KvType,
    /// The optimizer, which updates the weights: sgd, adam, adam-mixed or adam-8bit
    #[arg(long, value_name = "NAME", default_value = "adam-mixed", requires = "train")]
    optimizer: Optimizer,
    /// Which activations are computed again in the backward pass: none, selective (attention scores), full (all but
    /// each layer's input) or layers (full, a layer and a sequence at a time, as the example `train` does)
    #[arg(long, value_name = "NAME", default_value = "none", requires = "train")]
    checkpoint: Checkpointing,
    /// Memory that stays free, in percent of the memory used
    #[arg(long, value_name = "PERCENT", default_value = "20", value_parser = clap::value_parser!(u64).range(..=1000))]
    headroom: u64,
    /// The wanted rate, in tokens a second of all sequences together
    #[arg(long, value_name = "TOK/S", value_parser = tokens_per_second, allow_hyphen_values = true)]
    target: Option<f64>,
    /// One JSON object instead of tables
    #[arg(long)]
    pub json: bool,
}

fn wrong(what: String, remedy: &str) -> Error {
    Error::new(ErrorKind::InvalidArgument, what).remedy(remedy)
}

fn count(text: &str) -> Result<u64> {
    const MOST: u64 = 1 << 40;
    match text.trim().parse::<u64>() {
        Ok(n) if (1..=MOST).contains(&n) => Ok(n),
        Ok(n) => Err(wrong(format!("{n} is not from 1 to 2^40"), "give a number of that size")),
        Err(_) => {
            Err(wrong(format!("number {text:?} is not understood"), "give a whole number from 1 up, such as 4096"))
        }
    }
}

fn some_memory(text: &str) -> Result<Bytes> {
    match text.parse::<Bytes>()? {
        Bytes::ZERO => Err(wrong("a device of 0 bytes holds nothing".to_owned(), "give its memory, such as 24GiB")),
        memory => Ok(memory),
    }
}

fn positive(text: &str, scale: f64) -> Option<f64> {
    let n = text.trim().parse::<f64>().ok()? * scale;
    (n.is_finite() && n > 0.0).then_some(n)
}

fn seconds(text: &str) -> Result<f64> {
    let units = [("us", 1e-6), ("ms", 1e-3), ("s", 1.0)];
    let found = units.into_iter().find_map(|(unit, scale)| Some((text.trim().strip_suffix(unit)?, scale)));
    found
        .and_then(|(number, scale)| positive(number, scale))
        .ok_or_else(|| wrong(format!("time {text:?} is not understood"), "give more than none, such as 80ms or 1.5s"))
}

fn tokens_per_second(text: &str) -> Result<f64> {
    positive(text, 1.0).ok_or_else(|| {
        wrong(format!("{text:?} tokens a second is not understood"), "give a number above 0, such as 10 or 0.5")
    })
}

const CONTEXT: u64 = 4096;

/// Reads the header, if there is a file, and computes the plan.
pub fn run(options: &Options) -> Result<Plan> {
    let (mut shape, format, file) = shape(options)?;
    let context = match (options.context, shape.context) {
        (Some(asked), made_for) => {
            if let Some(made_for) = made_for.filter(|made_for| asked > *made_for) {
                shape.assumed.push(format!("a context of {asked} is more than the {made_for} the model was made for"));
            }
            asked
        }
        (None, made_for) => {
            let context = made_for.filter(|n| *n > 0).unwrap_or(CONTEXT).min(CONTEXT);
            shape.assumed.push(format!("context: {context} (--context)"));
            context
        }
    };
    let work = if options.train {
        Work::Train { optimizer: options.optimizer, checkpointing: options.checkpoint }
    } else {
        Work::Infer { kv: options.kv }
    };
    let mut job = Job { shape, work, context, batch: options.batch, headroom_percent: options.headroom };
    let hardware = Hardware::of(options, file.as_deref())?;
    let resources = resources(options, &hardware, &mut job)?;
    let supply = Supply {
        machine: hardware.machine().map(|machine| machine.name.clone()),
        sources: hardware.sources(options, &resources),
    };
    let forecast = planning::forecast(&job, &resources)?;
    let changes = planning::advice(&job, &resources, &forecast)?;
    let target = options.target.map(|wanted| planning::target(&job, &resources, &forecast, wanted)).transpose()?;
    let model = Model { file: options.model.as_ref().map(|path| path.display().to_string()), format };
    Ok(Plan::new(model, supply, &job, &resources, &forecast, &changes, target.as_ref()))
}

/// Where resources come from that options do not give.
enum Hardware {
    Machine(MachineModel),
    Here(Box<Here>),
    /// Options give all that is needed.
    Options,
}

impl Hardware {
    /// The machine that was named, or else this one if memory or disk are not given.
    fn of(options: &Options, file: Option<&Path>) -> Result<Self> {
        if let Some(name) = &options.machine {
            return MachineModel::find(name).map(Self::Machine);
        }
        if options.device_memory.is_some() && options.disk.is_some() {
            return Ok(Self::Options);
        }
        if options.device_memory.is_none() && options.link.is_some() {
            let what = "--link is a GPU's, and how much memory that has is not measured".to_owned();
            return Err(wrong(what, "give --device-memory too, or the machine's name or file with --machine"));
        }
        let remedy = "give --disk, such as 2GB/s, or the machine's name or file with --machine";
        Here::measure(file, options.disk, remedy).map(|here| Self::Here(Box::new(here)))
    }

    fn machine(&self) -> Option<&MachineModel> {
        match self {
            Self::Machine(machine) => Some(machine),
            Self::Here(here) => Some(&here.machine),
            Self::Options => None,
        }
    }

    /// Says where each of the resources comes from.
    fn sources(&self, options: &Options, resources: &Resources) -> Vec<Source> {
        let of = |what, given: Option<&str>, measured: Option<&Source>| match (given, self, measured) {
            (Some(option), ..) => Some(Source::new(what, format!("given by {option}"))),
            (None, Self::Machine(machine), _) => Some(Source::new(what, format!("machine {}", machine.name))),
            (None, _, Some(measured)) => Some(Source::new(what, measured.from.as_str())),
            _ => None,
        };
        let here = match self {
            Self::Here(here) => Some(&**here),
            _ => None,
        };
        let memory = here.map(|here| &here.memory);
        let disk = here.map(|here| &here.disk);
        let computing = here.map(|here| &here.computing);
        let sources = [
            of("device memory", options.device_memory.map(|_| "--device-memory"), memory),
            of("host memory", options.host_memory.map(|_| "--host-memory"), memory)
                .filter(|_| options.host_memory.is_some() || resources.host > Bytes::ZERO),
            of("disk", options.disk.map(|_| "--disk"), disk),
            of("link", options.link.map(|_| "--link"), None).filter(|_| resources.link.is_some()),
            of("computing", options.compute.map(|_| "--compute"), computing).filter(|_| resources.compute.is_some()),
        ];
        sources.into_iter().flatten().collect()
    }
}

/// Returns the machine's resources, or those that options give in their place. Adds to the assumptions what is not
/// accounted for.
fn resources(options: &Options, hardware: &Hardware, job: &mut Job) -> Result<Resources> {
    let missing = |option: &str| {
        wrong(format!("neither {option} nor --machine is given"), "give the option, or the machine's name or file")
    };
    let machine = hardware.machine();
    let mut known = machine.map(Resources::of).transpose()?;
    let here = matches!(hardware, Hardware::Here(_));
    if let (Hardware::Here(here), Some(known), Some(_)) = (hardware, &mut known, options.link) {
        // The device is a GPU: this machine's memory is the host's, and how fast the GPU computes is not known.
        (known.host, known.compute) = (here.machine.host_memory, None);
    }
    let device = options.device_memory.or(known.map(|known| known.device)).ok_or_else(|| missing("--device-memory"))?;
    let disk = options.disk.or(known.map(|known| known.disk)).ok_or_else(|| missing("--disk"))?;
    let assumed = &mut job.shape.assumed;
    if options.compute.is_none() && known.is_none_or(|known| known.compute.is_none()) {
        assumed.push("computing is not counted: --machine or --compute says how long it takes".to_owned());
    }
    if here && options.disk.is_none() {
        assumed.push("writes to the disk are as fast as reads".to_owned());
    }
    if let Some(machine) = machine.filter(|_| !here || options.link.is_none()) {
        let name = &machine.name;
        if machine.devices.get() > 1 {
            assumed.push(format!(
                "one of the {} devices of {name}, with all of its host memory and its disk",
                machine.devices
            ));
        }
        if (machine.unified_memory || machine.link.is_none()) && options.host_memory.is_none() {
            assumed.push(format!("no host tier: {name} has one memory for both (--host-memory)"));
        }
        if machine.compute.flops.is_none() && options.compute.is_none() {
            let why = match here {
                true => "the rate of operations is not measured".to_owned(),
                false => format!("{name} does not say compute.flops_per_second"),
            };
            let then =
                if options.train { "how long a step computes is not known" } else { "computing is reading memory" };
            assumed.push(format!("{why}: {then}"));
        }
    }
    Ok(Resources {
        device,
        host: options.host_memory.or(known.map(|known| known.host)).unwrap_or(Bytes::ZERO),
        disk,
        disk_write: known.and_then(|known| known.disk_write).filter(|_| options.disk.is_none()),
        disk_latency: known.filter(|_| options.disk.is_none()).map_or(Duration::ZERO, |known| known.disk_latency),
        disk_depth: known.map_or(QueueDepth::DEFAULT, |known| known.disk_depth),
        link: options.link.or(known.and_then(|known| known.link)),
        link_shared: options.link.is_none() && known.is_some_and(|known| known.link_shared),
        link_latency: match options.link {
            Some(_) => Duration::ZERO,
            None => known.map_or(Duration::ZERO, |known| known.link_latency),
        },
        compute: options.compute.map(Compute::Seconds).or(known.and_then(|known| known.compute)),
    })
}

/// Returns the model's shape, the format of its file, and the file on whose disk most of it is.
fn shape(options: &Options) -> Result<(Shape, Option<&'static str>, Option<PathBuf>)> {
    if let Some(parameters) = options.params {
        let given = Given {
            parameters,
            dtype: options.dtype.unwrap_or(DType::BF16),
            layers: options.layers,
            hidden: options.hidden,
            heads: options.heads,
            kv_heads: options.kv_heads,
            ffn: options.ffn,
            vocab: options.vocab,
            gated: options.gated,
            experts: options.experts.map(|count| GivenExperts {
                count,
                active: options.active_experts,
                ffn: options.expert_ffn,
            }),
        };
        return Ok((Shape::estimate(&given)?, None, None));
    }
    let path = options.model.clone().unwrap_or_default();
    if let Some(shape) = named::shape(&path, options.dtype)? {
        return Ok((shape, None, None));
    }
    let header = format::open(&path)?;
    let (config, format) = match (&header.metadata, header.files.first()) {
        (Metadata::Safetensors(_), Some(file)) => (Some(config_beside(&file.path)?), "safetensors"),
        _ => (None, "GGUF"),
    };
    let shape = Shape::of(&header, config.as_deref()).map_err(|error| error.context(path.display()))?;
    Ok((shape, Some(format), here::largest(&header)))
}
