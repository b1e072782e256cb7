//! The program `outcore` with one policy more: `own-policy policies --workload kv --policy lru,slru,kv`.

use std::process::ExitCode;

use outcore_cli::OwnPolicy;
use outcore_own_policy::SegmentedLru;

fn main() -> ExitCode {
    outcore_cli::main_with(&[OwnPolicy::new("slru", || Box::new(SegmentedLru::default()))])
}
