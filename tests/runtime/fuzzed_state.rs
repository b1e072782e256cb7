//! What must hold of any bytes in the manifest of a durable folder. The fuzz target `durable` and the tests use it.
//!
//! An input is a byte whose lowest bit says that checksums are to be made right, and the manifest.

use std::fs;
use std::os::unix::fs::PermissionsExt;

use outcore::durable::DurableReader;
use twox_hash::XxHash3_64;

const BLOCK: usize = 4096;
/// The bytes of slots that the manifests name.
const PAGES: &[u8] = include_bytes!("data/durable-v1/pages");

fn number(bytes: &[u8], at: usize) -> u64 {
    let eight: Option<[u8; 8]> = bytes.get(at..at + 8).and_then(|eight| eight.try_into().ok());
    eight.map_or(0, u64::from_le_bytes)
}

/// Makes right what a fuzzer cannot: the checksum in each reference to a block, from the bottom up, and those of heads.
fn repair(manifest: &mut [u8]) {
    let blocks = manifest.len() / BLOCK;
    let references = |manifest: &mut [u8], places: &mut dyn Iterator<Item = usize>| {
        for at in places {
            let block = number(manifest, at).wrapping_sub(1) as usize;
            if (2..blocks).contains(&block) && at + 16 <= manifest.len() {
                let sum = XxHash3_64::oneshot(&manifest[block * BLOCK..(block + 1) * BLOCK]);
                manifest[at + 8..at + 16].copy_from_slice(&sum.to_le_bytes());
            }
        }
    };
    // No tree of so few blocks is higher.
    for _ in 0..3 {
        references(manifest, &mut (2 * BLOCK..blocks * BLOCK).step_by(16));
    }
    for head in 0..blocks.min(2) {
        let generations = (0..32).map(|generation| head * BLOCK + 64 + 80 * generation);
        references(manifest, &mut generations.flat_map(|at| [at + 8, at + 32, at + 56]));
        let sum = XxHash3_64::oneshot(&manifest[head * BLOCK..head * BLOCK + BLOCK - 8]);
        manifest[head * BLOCK + BLOCK - 8..(head + 1) * BLOCK].copy_from_slice(&sum.to_le_bytes());
    }
}

/// Opens such a folder, verifies it and exports it: whatever the bytes, that ends without a panic, and what is exported
/// are the tensors that were listed. Returns whether the folder was opened.
pub fn check(input: &[u8]) -> bool {
    let Some((flags, manifest)) = input.split_first() else { return false };
    let mut manifest = manifest.to_vec();
    if flags & 1 == 1 {
        repair(&mut manifest);
    }
    let folder = tempfile::tempdir().unwrap();
    let of_user = |name: &str, bytes: &[u8]| {
        let path = folder.path().join(name);
        fs::write(&path, bytes).unwrap();
        fs::set_permissions(path, fs::Permissions::from_mode(0o600)).unwrap();
    };
    of_user("manifest", &manifest);
    of_user("pages", PAGES);
    of_user("lock", &[]);
    let Ok(reader) = DurableReader::open(folder.path(), None) else { return false };
    let tensors = reader.tensors();
    let exported = folder.path().join("exported");
    if reader.verify().is_ok() && reader.export(&exported).is_ok() {
        let bytes = fs::metadata(&exported).unwrap().len();
        assert!(!tensors.is_empty() && bytes > 8, "{bytes} bytes of {} tensors", tensors.len());
    }
    true
}
