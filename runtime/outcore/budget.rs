//! How many frames a budget holds.

use crate::device::HostSlab;
use crate::error::{Error, ErrorKind, Result};
use crate::ids::{Bytes, PageSize};

/// Page tables of a tier's frames that do not count in its budget; what exceeds this is taken from the budget. Both
/// together, with what the runtime itself takes, are within the 32 MiB that a process may hold beside its budgets.
const DEVICE_TABLES_BESIDE: Bytes = Bytes::mib(16);
const HOST_TABLES_BESIDE: Bytes = Bytes::mib(8);

/// How many frames a device budget holds, if each can have `tables` of page tables.
pub(crate) fn device_frames_of(budget: Bytes, page: PageSize, tables: Bytes) -> Result<u32> {
    frames_of("device", budget, page, tables, DEVICE_TABLES_BESIDE)
}

pub(crate) fn host_frames_of(budget: Bytes, page: PageSize) -> Result<u32> {
    frames_of("host", budget, page, HostSlab::tables_of_a_frame(page), HOST_TABLES_BESIDE)
}

/// How many frames a budget holds, if each can have `tables` of page tables. The tables of all frames together count as
/// far as they exceed `beside`.
fn frames_of(tier: &str, budget: Bytes, page: PageSize, tables: Bytes, beside: Bytes) -> Result<u32> {
    let with_tables = (budget + beside).get() / (page.bytes() + tables.get());
    u32::try_from(with_tables.min(budget.get() / page.bytes())).map_err(|_| {
        Error::new(ErrorKind::InvalidArgument, format!("a {tier} budget of {budget} has too many pages of {page:?}"))
            .remedy("choose larger pages")
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::KernelPages;

    #[test]
    fn page_tables_count_beyond_what_is_beside_the_budget() {
        let sizes = [4, 16, 64, 256, 2048, 16 << 10, 1 << 20].map(|kib| PageSize::new(Bytes::kib(kib)).unwrap());
        let pairs = KernelPages::ALL.into_iter().flat_map(|kernel| sizes.map(|page| (kernel, page)));
        for (kernel, page) in pairs.filter(|(kernel, page)| kernel.check(*page).is_ok()) {
            let tables = kernel.tables_of_a_frame(page);
            let held = |frames: u64| frames * (page.bytes() + tables.get());
            for frames in [1, 2, 12, 1000, 4096, 4097, 31_000, 1 << 20] {
                let budget = Bytes::new(frames * page.bytes() + page.bytes() / 2);
                let found = u64::from(device_frames_of(budget, page, tables).unwrap());
                let beside = (budget + DEVICE_TABLES_BESIDE).get();
                assert!(found >= 1 && held(found) <= beside, "{frames} of {page:?}: {found}");
                // As many as that allows, and as many as there are pages where that many have few tables.
                assert!(found == frames || held(found + 1) > beside, "{frames} of {page:?}: {found}");
                assert!(
                    found == frames || frames * tables.get() > DEVICE_TABLES_BESIDE.get(),
                    "{frames} of {page:?}: {found}"
                );
            }
        }
        let (page, budget) = (PageSize::DEFAULT, Bytes::gib(64));
        // Of 64 GiB and 8 MiB each frame takes a 512th more, or a 2048th or 8192th where the kernel's pages are larger.
        for (kernel, frames) in KernelPages::ALL.into_iter().zip([32_708, 32_756, 32_768]) {
            let tables = kernel.tables_among_others(page);
            assert_eq!(frames_of("host", budget, page, tables, HOST_TABLES_BESIDE).unwrap(), frames, "{kernel:?}");
        }
        // A GPU's memory is in no table of this process.
        assert_eq!(device_frames_of(budget, page, Bytes::ZERO).unwrap(), 32768);
        assert!(host_frames_of(Bytes::new(u64::MAX), page).is_err());
    }
}
