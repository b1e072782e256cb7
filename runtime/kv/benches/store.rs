//! How fast a store puts, opens and gets blocks, beside the same bytes in a plain file:
//!
//!     cargo bench -p outcore-kv --all-features --bench store -- [FOLDER]
//!
//! Reads come from the page cache, so they show what the store costs, not the disk.

#![allow(clippy::unwrap_used, reason = "a bench that cannot go on fails")]

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::Instant;

use outcore::Bytes;
use outcore_kv::{Admission, BlockKey, Fingerprint, Store, StoreKey, StoreOptions, StoredBlock, TenantId, Token};

/// Bytes of all blocks of a run.
const TOTAL: usize = 512 << 20;
const TOKENS: u32 = 16;

/// Bytes with about the entropy of keys and values in bf16: a few exponents, and random fractions.
fn bf16(count: usize) -> Vec<u8> {
    let mut state = 1_u64;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (state >> 33) as u32
    };
    let mut bytes = Vec::with_capacity(count);
    while bytes.len() < count {
        let sum: f32 = (0..4).map(|_| (next() & 0xFFFF) as f32 / 65_536.0 - 0.5).sum();
        bytes.extend_from_slice(&(sum.to_bits() >> 16).to_le_bytes()[..2]);
    }
    bytes
}

fn rate(since: Instant) -> f64 {
    TOTAL as f64 / 1e6 / since.elapsed().as_secs_f64()
}

fn main() {
    let given = std::env::args().skip(1).find(|word| !word.starts_with('-'));
    let parent = given.map_or_else(tempfile::tempdir, tempfile::tempdir_in).unwrap();
    plain(parent.path());
    println!("{:<24} {:>9} {:>9} {:>10} {:>9} {:>8}", "MB/s", "block", "put", "open, ms", "get", "written");
    let key = || StoreKey::from_bytes([1; 32]);
    for block in [64 << 10, 1 << 20, 4 << 20] {
        let options = StoreOptions::new().admit(Admission::Always);
        let kinds =
            [("plain", options.clone()), ("zstd", options.clone().compress(true)), ("sealed", options.key(key()))];
        for (name, options) in kinds {
            store(&parent.path().join(format!("{name}{block}")), name, block, options);
        }
    }
}

/// The ceiling: writes of 2 MiB and one sync, and reads of 2 MiB.
fn plain(folder: &Path) {
    let mut bytes = bf16(2 << 20);
    let path = folder.join("plain");
    let file = File::create_new(&path).unwrap();
    let start = Instant::now();
    for at in (0..TOTAL).step_by(bytes.len()) {
        file.write_all_at(&bytes, at as u64).unwrap();
    }
    file.sync_data().unwrap();
    let written = rate(start);
    let file = File::open(&path).unwrap();
    let start = Instant::now();
    for at in (0..TOTAL).step_by(bytes.len()) {
        file.read_exact_at(&mut bytes, at as u64).unwrap();
    }
    println!("a plain file: {written:.0} MB/s written, {:.0} MB/s read", rate(start));
    std::fs::remove_file(path).unwrap();
}

fn store(folder: &Path, name: &str, block: usize, options: StoreOptions) {
    let model = Fingerprint::of(&[b"bench"]);
    let open = || Store::open(folder, &model, Bytes::new(block as u64), options.clone()).unwrap();
    let count = (TOTAL / block) as u32;
    let (mut bytes, root, tenant) = (bf16(block), BlockKey::root(&model, 0), TenantId::new(0));
    let tokens = |number: u32| (0..TOKENS).map(|at| Token::new(number << 4 | at)).collect::<Vec<_>>();
    let made = open();
    let start = Instant::now();
    for number in 0..count {
        let tokens = tokens(number);
        let key = root.next(&tokens);
        made.put(&StoredBlock { key, parent: Some(root), tenant, tokens: &tokens, bytes: &bytes }).unwrap();
    }
    made.flush().unwrap();
    let put = rate(start);
    made.close().unwrap();
    let start = Instant::now();
    let opened = open();
    let open_ms = start.elapsed().as_secs_f64() * 1e3;
    let start = Instant::now();
    for number in 0..count {
        let tokens = tokens(number);
        assert!(opened.get(root.next(&tokens), Some(root), tenant, &tokens, &mut bytes).unwrap());
    }
    let got = rate(start);
    let written = opened.stats().written_per_byte_read().unwrap();
    println!("{name:<24} {:>5} KiB {put:>9.0} {open_ms:>10.1} {got:>9.0} {written:>8.3}", block >> 10);
    drop(opened);
    std::fs::remove_dir_all(folder).unwrap();
}
