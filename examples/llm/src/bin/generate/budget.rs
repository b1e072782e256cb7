//! How much memory there is, and how it is divided.

use outcore::machine::{LimitSource, MemoryLimit, ProcessMemory};
use outcore::{Bytes, Error, ErrorKind, PageSize, Result};
use outcore_llm::Config;

/// Left to the rest of the system where nothing limits the process but the machine: an eighth, at most this.
const HEADROOM_MAX: Bytes = Bytes::gib(2);
/// Left within a control group: what the kernel charges to it for page tables, rings and the program's own file.
const GROUP_HEADROOM: Bytes = Bytes::mib(2);
/// What the process grows by after the budgets are set, beyond keys, values and activations: thread stacks, page
/// tables, the page table of the pager, allocator slack.
const OWN_GROWTH: Bytes = Bytes::mib(4);
/// What the runtime locks of the host's memory for pages on their way to a GPU, at most.
const STAGING: Bytes = Bytes::mib(64);
/// Left of a GPU's memory: the driver's own, and the workspace of cuBLAS.
const GPU_HEADROOM: Bytes = Bytes::mib(96);
/// Frames below which pages get smaller, so that there is something to stream through.
const FRAMES_MIN: u64 = 128;

/// What the pages get.
#[derive(Clone, Copy, Debug)]
pub struct Budgets {
    pub device: Bytes,
    pub host: Bytes,
    pub page_size: PageSize,
}

/// What the options say.
#[derive(Clone, Copy, Debug)]
pub struct Wishes {
    pub memory: Option<Bytes>,
    pub device: Option<Bytes>,
    pub host: Bytes,
    pub page_size: Option<Bytes>,
}

/// Bytes that keys, values and the activations of one pass of `pass` tokens take.
pub fn working_memory(config: &Config, context: usize, pass: usize) -> Bytes {
    let kv = 2 * config.layers * config.kv_heads * config.head_dim * context * size_of::<f32>();
    // Of a pass, the widest vectors live at once: x, its norm, q, k, v, gate, up, and the quantised copy of one.
    let wide = 3 * config.dim + 2 * config.heads * config.head_dim + 3 * config.ffn_dim;
    Bytes::new((kv + pass * wide * size_of::<f32>() + 2 * config.vocab * size_of::<f32>()) as u64)
}

/// Refuses to use `used` of the host's memory where there is less.
fn check_host(used: Bytes, limit: &MemoryLimit) -> Result<()> {
    if used <= limit.limit {
        return Ok(());
    }
    let whose = match &limit.source {
        LimitSource::CgroupV1(folder) | LimitSource::CgroupV2(folder) => {
            format!("the control group {} allows {}", folder.display(), limit.limit)
        }
        _ => format!("the machine has {}", limit.limit),
    };
    Err(Error::new(
        ErrorKind::OutOfMemory,
        format!("this run would come to use {used} of memory, pages and all else, and {whose}"),
    )
    .remedy("leave --device-budget and --memory out, then what is there is divided, or give less"))
}

/// Divides the host's memory. `model` is the size of the model's files; `working` what computing takes.
///
/// # Errors
/// `BudgetTooSmall` if `--memory` leaves no room for pages; `OutOfMemory` if what would be used of a budget is more than the
/// machine or the control group has.
pub fn divide(wishes: Wishes, model: Bytes, working: Bytes) -> Result<Budgets> {
    let resident = ProcessMemory::now()?.resident;
    let taken = resident + working + OWN_GROWTH + wishes.host;
    let limit = MemoryLimit::detect()?;
    let device = match (wishes.device, wishes.memory) {
        (Some(device), None) => device,
        (Some(device), Some(cap)) => {
            if device + taken > cap {
                return Err(Error::new(
                    ErrorKind::BudgetTooSmall,
                    format!("--memory {cap} does not hold the device budget of {device} and the {taken} besides"),
                )
                .remedy("leave one of --memory and --device-budget out"));
            }
            device
        }
        (None, memory) => {
            let cap = match memory {
                Some(memory) => memory,
                None => default_cap(&limit, resident),
            };
            let left = cap.saturating_sub(taken);
            if left < Bytes::mib(1) {
                return Err(Error::new(
                    ErrorKind::BudgetTooSmall,
                    format!("{cap} of memory leaves no room for pages: the process itself takes {taken}"),
                )
                .remedy(format!("give at least {}, or a shorter prompt and fewer tokens", taken + Bytes::mib(8))));
            }
            // More than the model's pages is of no use.
            left.min(model + Bytes::mib(8))
        }
    };
    let used = device.min(model + Bytes::mib(8)) + taken;
    check_host(used, &limit)?;
    let page_size = match wishes.page_size {
        Some(size) => PageSize::new(size)?,
        None => default_page(device)?,
    };
    Ok(Budgets { device, host: wishes.host, page_size })
}

/// Divides the memory of a GPU, of which `free` is free. `model` is the size of the model's files; `working` what one
/// sequence takes besides the pages.
///
/// # Errors
/// `BudgetTooSmall` if what is free leaves no room for a page, or `--memory` none for the host's part; `OutOfMemory` if a
/// budget is more than the GPU, the machine or the control group has.
pub fn divide_gpu(wishes: Wishes, model: Bytes, working: Bytes, free: Bytes) -> Result<Budgets> {
    let host = ProcessMemory::now()?.resident + OWN_GROWTH + STAGING + wishes.host;
    if let Some(cap) = wishes.memory.filter(|cap| host > *cap) {
        return Err(Error::new(
            ErrorKind::BudgetTooSmall,
            format!("--memory {cap} does not hold the {host} of the host's memory that this run takes"),
        )
        .remedy("give less --host-budget, or more --memory"));
    }
    check_host(host, &MemoryLimit::detect()?)?;
    let page_size = wishes.page_size.map_or(Ok(PageSize::DEFAULT), PageSize::new)?;
    let page = Bytes::new(page_size.bytes());
    let besides = working + GPU_HEADROOM;
    let left = free.saturating_sub(besides);
    let device = wishes.device.unwrap_or_else(|| left.min(model + page + page));
    if device > left {
        return Err(Error::new(
            ErrorKind::OutOfMemory,
            format!("a device budget of {device} and the {besides} besides exceed the {free} that the GPU has free"),
        )
        .remedy(format!("give at most {left}, a shorter prompt or fewer tokens")));
    }
    // A budget that was asked for is the runtime's to refuse.
    if wishes.device.is_none() && device < page {
        return Err(Error::new(
            ErrorKind::BudgetTooSmall,
            format!("the GPU has {free} free: after the {besides} besides, that leaves no page of {page}"),
        )
        .remedy("give a shorter prompt or fewer tokens, or end what else uses the GPU's memory"));
    }
    Ok(Budgets { device, host: wishes.host, page_size })
}

fn default_cap(limit: &MemoryLimit, resident: Bytes) -> Bytes {
    let used_by_others = limit.usage.saturating_sub(resident);
    let free = limit.limit.saturating_sub(used_by_others);
    let headroom = match limit.source {
        LimitSource::CgroupV1(_) | LimitSource::CgroupV2(_) => Bytes::new(free.get() / 50) + GROUP_HEADROOM,
        _ => Bytes::new(free.get() / 8).min(HEADROOM_MAX),
    };
    free.saturating_sub(headroom)
}

fn default_page(device: Bytes) -> Result<PageSize> {
    let fitting = (device.get() / FRAMES_MIN).max(1);
    let size = (1u64 << fitting.ilog2()).clamp(64 << 10, PageSize::DEFAULT.bytes());
    PageSize::new(Bytes::new(size))
}
