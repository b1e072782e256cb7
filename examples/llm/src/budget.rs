//! How much memory there is, and how it is divided.

use outcore::machine::{LimitSource, MemoryLimit, ProcessMemory};
use outcore::{Bytes, Error, ErrorKind, PageSize, Result};

use crate::config::Config;
use crate::dtype::KvType;
use crate::expert_pass;
use crate::fp8;
use crate::kernels;

/// Left to the rest of the system where only the machine limits the process: an eighth of memory, at most this.
const HEADROOM_MAX: Bytes = Bytes::gib(2);
/// Left free within a control group, because the kernel charges page tables, rings and the program's own file to it.
const GROUP_HEADROOM: Bytes = Bytes::mib(2);
/// What the process grows by after the budgets are set, beyond what computing takes: the store's threads, page tables,
/// the page table of the pager, allocator slack.
const OWN_GROWTH: Bytes = Bytes::mib(4);
/// The most host memory that the runtime locks for pages on their way to a GPU.
const STAGING: Bytes = Bytes::mib(64);
/// Left free in a GPU's memory, for the driver and for the code that it and cuBLASLt load.
const GPU_HEADROOM: Bytes = Bytes::mib(96);

/// Least room for pages that a run is begun with.
const LEAST_FOR_PAGES: Bytes = Bytes::mib(1);
/// What else a compute thread takes: the part of its stack that is used, and the allocator's arena.
const A_THREAD: Bytes = Bytes::kib(32);
/// Activations may take one part in eight of what is left for them and for pages. More activations save passes over
/// the weights while the prompt is read; more pages save reads in every pass of the answer.
const ACTIVATIONS_SHARE: u64 = 8;
/// Fewest tokens worth a pass over the weights, where a prompt is read in several.
const PASS_MIN: usize = 32;

/// What the pages get, and how the prompt is read.
#[derive(Clone, Copy, Debug)]
pub struct Budgets {
    /// The device budget.
    pub device: Bytes,
    /// What was asked for, if that is more than the model's pages.
    pub device_asked: Option<Bytes>,
    /// The host budget.
    pub host: Bytes,
    /// Most tokens of one pass.
    pub pass: usize,
    /// What computing takes besides pages in such passes, keys and values included.
    pub working: Bytes,
}

/// Keys and values of a sequence of `context` tokens, in elements of `kv`. Also those that windows have left, which
/// stay: a pass uses less, as [`KvLayout::pass_bytes`](outcore_kv::KvLayout::pass_bytes) says of pages.
pub fn keys_values(config: &Config, context: usize, kv: KvType) -> Bytes {
    let [kv_heads, head_dim, layers, context] =
        [config.kv_heads, config.head_dim, config.layers, context].map(|size| size as u128);
    let bytes = 2 * layers * kv_heads * head_dim * context * u128::from(kv.bytes());
    Bytes::new(u64::try_from(bytes).unwrap_or(u64::MAX))
}

/// What the options say.
#[derive(Clone, Copy, Debug)]
pub struct Wishes {
    /// What the process may use in all.
    pub memory: Option<Bytes>,
    /// The device budget.
    pub device: Option<Bytes>,
    /// The host budget.
    pub host: Bytes,
    /// The size of pages.
    pub page_size: Option<Bytes>,
}

/// What computing takes besides the weights.
#[derive(Clone, Copy, Debug)]
pub struct Working {
    /// Keys and values, logits, attention scores, threads.
    pub fixed: Bytes,
    /// Activations of one token of a pass.
    pub token: Bytes,
    /// Tokens of the prompt.
    pub prompt: usize,
}

impl Working {
    /// For a prompt of `prompt` tokens in a sequence of `context`, computed by `threads` threads. Keys and values of
    /// `plain` tokens of it are in no page, in
    /// elements of `kv`.
    pub fn of(config: &Config, context: usize, plain: usize, kv: KvType, prompt: usize, threads: usize) -> Self {
        // Wide enough for the product of any sizes that a configuration may have.
        let [dim, ffn, heads, kv_heads, head_dim, vocab, positions, threads] = [
            config.dim,
            config.ffn_dim,
            config.heads,
            config.kv_heads,
            config.head_dim,
            config.vocab,
            context,
            threads,
        ]
        .map(|size| size as u128);
        const FLOAT: u128 = size_of::<f32>() as u128;
        let bytes = |n: u128| Bytes::new(u64::try_from(n).unwrap_or(u64::MAX));
        let (q, k) = (heads * head_dim, kv_heads * head_dim);
        // The logits, their bytes for the hash, and the sampler's odds of 16 bytes each.
        let logits = 6 * vocab;
        let scores = threads * positions;
        // The copy of a vector that enters a matrix, laid out for the kernels.
        let copy = |elements: u128| elements * kernels::PREPARED_BYTES as u128 / FLOAT;
        // A product of several vectors exists twice for a while, by rows and by vectors.
        let attention = 2 * (q + k) + copy(q) + 2 * dim;
        let feed_forward = |ffn: u128| 2 * ffn + ffn.max(copy(ffn) + 2 * dim);
        // Products of gate and of up that one matrix makes exist twice.
        let of_expert = |ffn: u128| feed_forward(ffn).max(4 * ffn);
        // Of a mixture, all tokens may draw the same expert: their vectors are copied for it. The router's scores, and
        // of each expert that is drawn its number, the token's, and the weight; the same of what is foreseen.
        let mixture = config.mixture.as_ref().map_or(0, |mixture| {
            let [count, used, ffn] = [mixture.count, mixture.used, mixture.ffn_dim].map(|size| size as u128);
            (4 * count + 12 * used + dim + copy(dim) + of_expert(ffn)).max(feed_forward(mixture.shared_ffn_dim as u128))
        });
        let together = config.mixture.as_ref().map_or(0, |mixture| {
            expert_pass::together_most(mixture, config.dim) as u128 * expert_pass::draw_bytes(mixture, config.dim)
                + expert_pass::kept_most(mixture, config.dim) as u128 * expert_pass::kept_bytes(config.dim)
        });
        let feed_forward = feed_forward(ffn).max(mixture);
        // In use throughout: the residual stream, its norm, the quantised copy of the norm, the sines and cosines.
        let floats = 2 * dim + copy(dim) + head_dim + attention.max(feed_forward);
        // A quarter more for what the allocator cannot reuse at once; 256 bytes for the order of the token's steps.
        let token = bytes(floats * FLOAT * 5 / 4 + 256);
        // Where scales lie apart, rows are put into another form.
        let of_experts = config.mixture.as_ref().map_or(0, |mixture| mixture.ffn_dim.max(mixture.shared_ffn_dim));
        let longest = dim.max(ffn).max(q).max(of_experts as u128);
        let of_rows = (fp8::ROWS as u128 * FLOAT * longest).max(kernels::SCRATCH_BYTES as u128);
        let scratch = if config.scale_bytes > 0 { of_rows } else { 0 };
        let of_threads = (u128::from(A_THREAD.get()) + scratch) * threads;
        let fixed = bytes((logits + scores) * FLOAT + together + of_threads);
        let held = keys_values(config, plain, kv).get().saturating_add(config.scale_bytes);
        let fixed = Bytes::new(fixed.get().saturating_add(held));
        Self { fixed, token, prompt }
    }

    /// All of it, in passes of `pass` tokens.
    pub fn bytes(&self, pass: usize) -> Bytes {
        self.fixed + Bytes::new(self.token.get().saturating_mul(pass as u64))
    }

    /// The longest pass whose activations fit `room`, but no shorter than is worth it.
    fn pass(&self, room: Bytes) -> usize {
        let fitting = usize::try_from(room.get() / self.token.get().max(1)).unwrap_or(usize::MAX);
        in_equal_passes(self.prompt, fitting)
    }
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

/// Divides the host's memory. `files` are the lengths of the model's files; `page_of` chooses the size of pages for a
/// device budget, where none was asked for.
///
/// # Errors
/// `BudgetTooSmall` if `--memory` leaves no room for pages, or a host budget holds none; `OutOfMemory` if what would be
/// used of a budget is more than the machine or the control group has.
pub fn divide(
    wishes: Wishes,
    files: &[Bytes],
    working: Working,
    page_of: impl Fn(Bytes) -> Result<PageSize>,
) -> Result<Budgets> {
    divide_of(wishes, files, working, page_of, ProcessMemory::now()?, &MemoryLimit::detect()?)
}

fn divide_of(
    wishes: Wishes,
    files: &[Bytes],
    working: Working,
    page_of: impl Fn(Bytes) -> Result<PageSize>,
    held: ProcessMemory,
    limit: &MemoryLimit,
) -> Result<Budgets> {
    let page_of = |device| wishes.page_size.map_or_else(|| page_of(device), PageSize::new);
    // More frames than the model has pages are of no use.
    let pages =
        |page: PageSize| Bytes::new(files.iter().map(|len| page.pages_for(len.get())).sum::<u64>() * page.bytes());
    let besides = held.resident + OWN_GROWTH + wishes.host;
    let cap = wishes.memory.unwrap_or_else(|| default_cap(limit, held.anonymous));
    let room = cap.saturating_sub(besides + working.fixed);
    let pass = working.pass(match wishes.device {
        Some(device) => room.saturating_sub(device),
        None => Bytes::new(room.get() / ACTIVATIONS_SHARE),
    });
    let taken = besides + working.bytes(pass);
    let wanted = match wishes.device {
        Some(device) => device,
        None => {
            let left = cap.saturating_sub(taken);
            if left < LEAST_FOR_PAGES {
                let least = Bytes::mib((taken + LEAST_FOR_PAGES).get().div_ceil(Bytes::mib(1).get()));
                return Err(Error::new(
                    ErrorKind::BudgetTooSmall,
                    format!("{cap} of memory leaves no room for pages: the process itself takes {taken}"),
                )
                .remedy(format!("give at least {}MiB, or a shorter prompt and fewer tokens", least.get() >> 20)));
            }
            left
        }
    };
    let all = files.iter().fold(Bytes::ZERO, |sum, len| sum + *len);
    let page_size = page_of(wanted.min(all))?;
    let device = wanted.min(pages(page_size));
    if wishes.memory.is_some_and(|cap| wanted + taken > cap) {
        return Err(Error::new(
            ErrorKind::BudgetTooSmall,
            format!("--memory {cap} does not hold the device budget of {wanted} and the {taken} besides"),
        )
        .remedy("leave one of --memory and --device-budget out"));
    }
    check_host(device + taken, limit)?;
    let page = Bytes::new(page_size.bytes());
    if wishes.host > Bytes::ZERO && wishes.host < page {
        return Err(Error::new(
            ErrorKind::BudgetTooSmall,
            format!("--host-budget {} does not hold one page of {page}", wishes.host),
        )
        .remedy(format!("give at least {page}, smaller pages by --page-size, or 0 for no host tier")));
    }
    let device_asked = wishes.device.filter(|asked| *asked > device);
    let (host, working) = (wishes.host.min(pages(page_size)), working.bytes(pass));
    Ok(Budgets { device, device_asked, host, pass, working })
}

/// Divides the memory of a GPU, of which `free` is free. `files` are the lengths of the model's files; `working` says
/// what one sequence takes besides the pages, in passes of as many tokens as it is given; the prompt has `prompt`.
/// `tables_of` says what the GPU's page tables take of its memory for host memory that it locks. Where nobody asked for
/// a page size, `page_of` says which one a device budget has.
///
/// # Errors
/// `BudgetTooSmall` if what is free leaves no room for a page, or `--memory` none for the host's part; `OutOfMemory` if
/// a budget is more than the GPU, the machine or the control group has; the errors of `working`.
pub fn divide_gpu(
    wishes: Wishes,
    files: &[Bytes],
    working: impl Fn(usize) -> crate::error::Result<Bytes>,
    prompt: usize,
    free: Bytes,
    tables_of: impl Fn(Bytes) -> Bytes,
    page_of: impl Fn(Bytes) -> outcore::Result<PageSize>,
) -> crate::error::Result<Budgets> {
    let host = ProcessMemory::now()?.resident + OWN_GROWTH + STAGING + wishes.host;
    if let Some(cap) = wishes.memory.filter(|cap| host > *cap) {
        return Err(Error::new(
            ErrorKind::BudgetTooSmall,
            format!("--memory {cap} does not hold the {host} of the host's memory that this run takes"),
        )
        .remedy("give less --host-budget, or more --memory")
        .into());
    }
    check_host(host, &MemoryLimit::detect()?)?;
    divide_gpu_of(wishes, files, working, prompt, free, tables_of, page_of)
}

fn divide_gpu_of(
    wishes: Wishes,
    files: &[Bytes],
    working: impl Fn(usize) -> crate::error::Result<Bytes>,
    prompt: usize,
    free: Bytes,
    tables_of: impl Fn(Bytes) -> Bytes,
    page_of: impl Fn(Bytes) -> outcore::Result<PageSize>,
) -> crate::error::Result<Budgets> {
    // More frames than the model has pages are of no use.
    let all =
        |size: PageSize| Bytes::new(files.iter().map(|len| size.pages_for(len.get())).sum::<u64>() * size.bytes());
    let pages = all(match wishes.page_size {
        Some(asked) => PageSize::new(asked)?,
        None => {
            // A smaller budget has no larger pages, and smaller pages come to no more: this ends at the size that the
            // budget for all pages of it has.
            let mut size = PageSize::USUAL_ON_GPU;
            loop {
                let next = page_of(all(size))?;
                if next >= size {
                    break size;
                }
                size = next;
            }
        }
    });
    let least_page = wishes.page_size.unwrap_or(Bytes::new(PageSize::DEFAULT.bytes()));
    let asked = wishes.device.map(|asked| asked.min(pages));
    let host = wishes.host.min(pages);
    let beside_pages = GPU_HEADROOM + tables_of(host + STAGING);
    let room = free.saturating_sub(beside_pages);
    let least = working(1)?;
    let for_activations = match asked {
        Some(device) => room.saturating_sub(device),
        None => least + Bytes::new(room.saturating_sub(least).get() / ACTIVATIONS_SHARE),
    };
    let pass = longest_pass(prompt, for_activations, &working)?;
    let taken = working(pass)?;
    let besides = taken + beside_pages;
    let left = free.saturating_sub(besides);
    let device = asked.unwrap_or_else(|| left.min(pages));
    if device > left {
        let what = match wishes.device {
            Some(asked) if asked > pages => format!("the {pages} of the model's pages"),
            _ => format!("a device budget of {device}"),
        };
        return Err(Error::new(
            ErrorKind::OutOfMemory,
            format!("{what} and the {besides} besides exceed the {free} that the GPU has free"),
        )
        .remedy(format!("give a --device-budget of at most {left}, a shorter prompt or fewer tokens"))
        .into());
    }
    // If a budget was asked for and is too small, the runtime refuses it.
    if asked.is_none() && device < least_page {
        return Err(Error::new(
            ErrorKind::BudgetTooSmall,
            format!("the GPU has {free} free: after the {besides} besides, that leaves no page of {least_page}"),
        )
        .remedy("give a shorter prompt or fewer tokens, or end what else uses the GPU's memory")
        .into());
    }
    let device_asked = wishes.device.filter(|asked| *asked > device);
    Ok(Budgets { device, device_asked, host, pass, working: taken })
}

/// The longest pass with which a sequence takes no more than `room`, but no shorter than is worth it; passes are of
/// equal length. `working` grows with the pass.
fn longest_pass(
    prompt: usize,
    room: Bytes,
    working: impl Fn(usize) -> crate::error::Result<Bytes>,
) -> crate::error::Result<usize> {
    let (mut fits, mut exceeds) = (0, prompt + 1);
    while exceeds - fits > 1 {
        let pass = fits + (exceeds - fits) / 2;
        if working(pass)? <= room { fits = pass } else { exceeds = pass }
    }
    Ok(in_equal_passes(prompt, fits))
}

/// The length of passes of which none is longer than `fitting`, as few and as equal as will do; but none is shorter
/// than is worth it.
fn in_equal_passes(prompt: usize, fitting: usize) -> usize {
    let passes = prompt.div_ceil(fitting.max(PASS_MIN)).max(1);
    prompt.div_ceil(passes)
}

/// Of what is used, `own` is this process's.
fn default_cap(limit: &MemoryLimit, own: Bytes) -> Bytes {
    let used_by_others = limit.usage.saturating_sub(own);
    let free = limit.limit.saturating_sub(used_by_others);
    let headroom = match limit.source {
        LimitSource::CgroupV1(_) | LimitSource::CgroupV2(_) => Bytes::new(free.get() / 50) + GROUP_HEADROOM,
        _ => Bytes::new(free.get() / 8).min(HEADROOM_MAX),
    };
    free.saturating_sub(headroom)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

    use super::*;

    const WORKING: Working = Working { fixed: Bytes::mib(40), token: Bytes::kib(40), prompt: 1000 };

    fn wishes(memory: Option<u64>, device: Option<Bytes>) -> Wishes {
        Wishes { memory: memory.map(Bytes::new), device, host: Bytes::ZERO, page_size: None }
    }

    fn divided(wishes: Wishes) -> Result<Budgets> {
        let limit = MemoryLimit { limit: Bytes::gib(64), usage: Bytes::gib(1), source: LimitSource::Machine };
        let held = ProcessMemory { resident: Bytes::mib(12), ..ProcessMemory::default() };
        divide_of(wishes, &[Bytes::mib(98)], WORKING, |_| Ok(PageSize::DEFAULT), held, &limit)
    }

    #[test]
    fn regression_the_least_memory_an_error_names_is_enough() {
        let error = divided(wishes(Some(1 << 20), None)).unwrap_err();
        let advice = error.advice().unwrap();
        let least: Bytes = advice.split_whitespace().nth(3).unwrap().trim_end_matches(',').parse().unwrap();
        divided(wishes(Some(least.get()), None)).unwrap();
        assert_eq!(divided(wishes(Some(least.get() - (1 << 20)), None)).unwrap_err().kind(), ErrorKind::BudgetTooSmall);
    }

    #[test]
    fn a_prompt_is_read_in_passes_whose_activations_leave_room_for_pages() {
        for memory in 60..400 {
            let Ok(budgets) = divided(wishes(Some(memory << 20), None)) else { continue };
            let all = budgets.device + WORKING.bytes(budgets.pass) + Bytes::mib(12) + OWN_GROWTH;
            assert!(all.get() <= memory << 20, "{memory}: {budgets:?}");
            assert!(budgets.pass >= PASS_MIN && budgets.pass <= WORKING.prompt, "{memory}: {budgets:?}");
        }
        assert_eq!(divided(wishes(None, None)).unwrap().pass, WORKING.prompt);
    }

    #[test]
    fn regression_there_are_no_more_frames_than_the_model_has_pages() {
        let budgets = divided(wishes(None, Some(Bytes::gib(100)))).unwrap();
        assert_eq!((budgets.device, budgets.device_asked), (Bytes::mib(98), Some(Bytes::gib(100))));
        let budgets = divided(wishes(None, Some(Bytes::mib(50)))).unwrap();
        assert_eq!((budgets.device, budgets.device_asked), (Bytes::mib(50), None));
    }

    /// What a sequence takes on a GPU: 40 MiB, and 40 KiB for each token of a pass.
    fn on_gpu(pass: usize) -> crate::error::Result<Bytes> {
        Ok(WORKING.bytes(pass))
    }

    /// Eight bytes for each 4 KiB.
    fn tables_of(host: Bytes) -> Bytes {
        Bytes::new(host.get().div_ceil(512))
    }

    fn divided_gpu(device: Option<Bytes>, free: Bytes) -> crate::error::Result<Budgets> {
        divided_gpu_beside(Bytes::ZERO, device, free, Bytes::mib(97))
    }

    /// With a host tier, for a model of two files.
    fn divided_gpu_beside(
        host: Bytes,
        device: Option<Bytes>,
        free: Bytes,
        model: Bytes,
    ) -> crate::error::Result<Budgets> {
        // As a runtime chooses: 16 MiB, or less where the budget holds fewer than twelve.
        let page_of = |budget: Bytes| {
            let size = [16, 8, 4].map(Bytes::mib).into_iter().find(|size| budget.get() / size.get() >= 12);
            PageSize::new(size.unwrap_or(Bytes::mib(2)))
        };
        let files = [Bytes::mib(61), model.saturating_sub(Bytes::mib(61))];
        let wishes = Wishes { host, ..wishes(None, device) };
        divide_gpu_of(wishes, &files, on_gpu, WORKING.prompt, free, tables_of, page_of)
    }

    /// The GPU's page tables for the host tier were left out: its memory then did not hold the whole of the tier's.
    #[test]
    fn regression_page_tables_for_the_host_tier_are_beside_the_pages_of_a_gpu() {
        let (free, host, model) = (Bytes::mib(2000), Bytes::gib(64), Bytes::gib(100));
        let tables = tables_of(host + STAGING);
        assert!(tables > Bytes::mib(128));
        let budgets = divided_gpu_beside(host, None, free, model).unwrap();
        let all = budgets.device + budgets.working + GPU_HEADROOM + tables;
        assert!(budgets.host == host && all <= free, "{budgets:?}");
        // A budget that was asked for has to leave room for them.
        let most = free.saturating_sub(WORKING.bytes(PASS_MIN) + GPU_HEADROOM + Bytes::mib(4));
        let error = divided_gpu_beside(host, Some(most), free, model).unwrap_err().to_string();
        assert!(error.contains("exceed") && error.contains("2.0 GiB"), "{error}");
        divided_gpu_beside(Bytes::ZERO, Some(most), free, model).unwrap();
        // No more of the tier is locked than the model has pages.
        let small = divided_gpu_beside(host, None, free, Bytes::mib(97)).unwrap();
        assert!(small.host < Bytes::mib(128), "{small:?}");
    }

    #[test]
    fn regression_a_long_prompt_is_read_in_passes_that_leave_a_gpu_room_for_pages() {
        let mut passes = std::collections::HashSet::new();
        for free in 140..600 {
            let free = Bytes::mib(free);
            let budgets = divided_gpu(None, free).unwrap();
            let all = budgets.device + WORKING.bytes(budgets.pass) + GPU_HEADROOM + tables_of(STAGING);
            assert!(all <= free, "{free}: {budgets:?}");
            assert!(budgets.pass >= PASS_MIN && budgets.pass <= WORKING.prompt, "{free}: {budgets:?}");
            passes.insert(budgets.pass);
        }
        assert!(passes.len() > 5 && passes.contains(&WORKING.prompt), "{passes:?}");
        // One pass would have left pages less than 9 MiB.
        let budgets = divided_gpu(None, Bytes::mib(184)).unwrap();
        assert!(budgets.device >= Bytes::mib(40) && budgets.pass < WORKING.prompt, "{budgets:?}");
        // If a budget was asked for, the activations get the rest.
        let budgets = divided_gpu(Some(Bytes::mib(4)), Bytes::mib(184)).unwrap();
        assert_eq!((budgets.device, budgets.pass), (Bytes::mib(4), WORKING.prompt));
    }

    #[test]
    fn regression_there_are_no_more_frames_on_a_gpu_than_the_model_has_pages() {
        // 104 MiB hold twelve pages of 8 MiB.
        let all = Bytes::mib(64 + 40);
        for asked in [None, Some(Bytes::gib(100)), Some(all)] {
            let budgets = divided_gpu(asked, Bytes::gib(8)).unwrap();
            assert_eq!((budgets.device, budgets.device_asked), (all, asked.filter(|asked| *asked > all)));
        }
        let budgets = divided_gpu(Some(Bytes::mib(50)), Bytes::gib(8)).unwrap();
        assert_eq!((budgets.device, budgets.device_asked), (Bytes::mib(50), None));
        let error = divided_gpu(Some(Bytes::gib(100)), Bytes::mib(200)).unwrap_err().to_string();
        assert!(error.contains("104.0 MiB") && error.contains("at most"), "{error}");
    }
}
