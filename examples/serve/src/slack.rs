//! Memory that nobody uses now goes to pages.
//!
//! Memory is divided once, for the longest pass that may come and for grammars. Most passes are short, and most servers
//! write no answer of a given form: what is kept for that would lie idle while weights are read from the disk again and
//! again. So before each pass pages get what the pass leaves ([`fit`](Slack::fit)), and give it back before a longer
//! one begins.
//!
//! The device budget is what it was when memory was divided, plus what the pass at hand and grammars leave of their
//! parts, less what the process has come to have besides pages since then. The last counts what the allocator keeps of
//! a longer pass.

use outcore::machine::ProcessMemory;
use outcore::{Bytes, Result, Runtime};
use parking_lot::Mutex;

/// The budget grows by at least this part of the least one: a change moves frames.
const STEP_PART: u64 = 256;
/// Pages want more if less than one part in so many of their frames is free.
const FREE_PART: u64 = 16;
/// The system may back a frame with a page of this size, which backs its neighbours too.
const HUGE_PAGE: Bytes = Bytes::mib(2);

/// What is kept for others than pages.
#[derive(Clone, Copy, Debug)]
pub struct Kept {
    /// Activations of a token of a pass.
    pub token: Bytes,
    /// Logits behind a token.
    pub row: Bytes,
    /// All of it, in the longest pass.
    pub pass: Bytes,
    /// Grammars, until the first one is asked for.
    pub grammars: Bytes,
}

/// See the [module's documentation](self).
#[derive(Debug)]
pub struct Slack {
    runtime: Runtime,
    kept: Kept,
    /// The device budget beside all that is kept.
    least: Bytes,
    /// With a larger one no page would be read less often.
    most: Bytes,
    /// What the process had besides pages when nothing of what is kept was in use.
    besides: Bytes,
    used: Mutex<Used>,
}

/// What of [`Kept`] may be in use now.
#[derive(Debug, Default)]
struct Used {
    pass: Bytes,
    grammars: bool,
    /// The system did not let the budget grow: it does not, until it has shrunk.
    refused: bool,
}

impl Slack {
    /// Of a runtime whose device budget leaves room for all that is `kept`, of which nothing is in use yet. `all` is
    /// the bytes of all pages that there can be.
    ///
    /// # Errors
    /// If the system does not say how much memory the process has.
    pub fn new(runtime: &Runtime, kept: Kept, all: Bytes) -> Result<Self> {
        let least = runtime.stats().device.budget;
        // As little as it may be: what is taken for it now, and is a page's, pages would get twice later.
        let besides = besides_pages(runtime, HUGE_PAGE)?;
        Ok(Self { runtime: runtime.clone(), kept, least, most: all.max(least), besides, used: Mutex::default() })
    }

    /// The device budget that there is at any time.
    pub fn least(&self) -> Bytes {
        self.least
    }

    /// Makes room for a pass over so many tokens, of which so many have logits; or gives pages what it leaves. Nothing
    /// of the pass before is in use any more.
    ///
    /// # Errors
    /// If pages do not give up what the pass needs.
    pub fn fit(&self, tokens: usize, rows: usize) -> Result<()> {
        let of = |each: Bytes, count: usize| Bytes::new(each.get().saturating_mul(count as u64));
        let mut used = self.used.lock();
        used.pass = (of(self.kept.token, tokens) + of(self.kept.row, rows.max(1))).min(self.kept.pass);
        self.divide(&mut used)
    }

    /// Makes room for grammars, from now on.
    ///
    /// # Errors
    /// If pages do not give up what grammars need.
    pub fn begin_grammars(&self) -> Result<()> {
        let mut used = self.used.lock();
        if used.grammars {
            return Ok(());
        }
        used.grammars = true;
        let divided = self.divide(&mut used);
        used.grammars = divided.is_ok();
        divided
    }

    fn divide(&self, used: &mut Used) -> Result<()> {
        let stats = self.runtime.stats();
        let budget = stats.device.budget;
        let frames = stats.device_frames;
        let are_scarce = frames.free < (frames.free + frames.used) / FREE_PART;
        if budget <= self.least && (used.refused || !are_scarce) {
            return Ok(());
        }
        let grammars = if used.grammars { Bytes::ZERO } else { self.kept.grammars };
        let left = self.kept.pass.saturating_sub(used.pass) + grammars;
        let grown = besides_pages(&self.runtime, Bytes::ZERO)?.saturating_sub(self.besides);
        let wanted = (self.least + left.saturating_sub(grown)).min(self.most);
        let step = Bytes::new(self.least.get() / STEP_PART);
        if wanted >= budget && (wanted < budget + step || used.refused) {
            return Ok(());
        }
        match self.runtime.set_device_budget(wanted) {
            Err(error) if wanted > budget => {
                tracing::debug!(%error, "pages stay as few as they are");
                used.refused = true;
                Ok(())
            }
            Ok(()) => {
                used.refused &= wanted > budget;
                Ok(())
            }
            Err(error) => Err(error),
        }
    }
}

/// What the process has in memory besides pages, where each page takes at least so much.
fn besides_pages(runtime: &Runtime, least: Bytes) -> Result<Bytes> {
    let stats = runtime.stats();
    // Read behind it: a page that comes meanwhile counts once too often, and not once too little.
    let resident = ProcessMemory::now()?.resident;
    let each = stats.page_size.bytes().max(least.get());
    Ok(resident.saturating_sub(Bytes::new(stats.device_frames.used.saturating_mul(each))))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

    use outcore_llm::synthetic::Spec;
    use outcore_llm::{Arch, WeightType};

    use super::*;

    const PAGE: Bytes = Bytes::kib(16);

    #[test]
    fn pages_have_what_nobody_uses_and_give_it_back() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("small.gguf");
        let spec = Spec {
            arch: Arch::Llama,
            dtype: WeightType::F32,
            layers: 4,
            dim: 128,
            heads: 2,
            kv_heads: 1,
            head_dim: 64,
            ffn_dim: 256,
            vocab: 300,
            context: 64,
            tied: false,
            seed: 7,
            experts: None,
            window: 20,
        };
        spec.write_gguf(&path).unwrap();
        let all = Bytes::new(std::fs::metadata(&path).unwrap().len().next_multiple_of(PAGE.get()));
        let least = Bytes::new(16 * PAGE.get());
        let page = outcore::PageSize::new(PAGE).unwrap();
        let runtime = Runtime::builder().page_size(page).device_budget(least).open().unwrap();
        let model = runtime.open_model(&path).unwrap();
        // What else the process takes meanwhile is much less.
        let kept = Kept { token: Bytes::mib(2), row: Bytes::ZERO, pass: Bytes::mib(128), grammars: Bytes::mib(128) };
        let slack = Slack::new(&runtime, kept, all).unwrap();
        let budget = || runtime.stats().device.budget;
        slack.fit(1, 1).unwrap();
        assert_eq!(budget(), least, "no page has been read: more would be of no use");
        let names: Vec<String> = model.header().tensors.iter().map(|tensor| tensor.name.clone()).collect();
        let read_all = || {
            for name in &names {
                drop(runtime.pin(&model.tensor(name).unwrap()).wait().unwrap());
            }
        };
        read_all();

        slack.fit(1, 1).unwrap();
        assert_eq!(budget(), all, "of what pages could have, the model takes least");
        read_all();
        // The longest pass and grammars together leave nothing; each alone leaves what the other does not use.
        slack.fit(64, 1).unwrap();
        assert_eq!(budget(), all);
        slack.begin_grammars().unwrap();
        assert_eq!(budget(), least);
        slack.fit(1, 1).unwrap();
        assert_eq!(budget(), all);
        read_all();
        // So does what the process has besides, whatever it is.
        let besides = vec![1_u8; 160 << 20];
        slack.fit(1, 1).unwrap();
        assert_eq!(budget(), least, "{}", std::hint::black_box(&besides).len());
        assert!(runtime.stats().device.used <= least);
    }
}
