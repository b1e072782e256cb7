//! Rust programs that map a model as candle's `MmapedSafetensors` does, by memmap2 and safetensors: they read the same
//! bytes, and know nothing of it. And the order in which a program uses a model is kept for its next start.

use std::os::unix::fs::FileExt;

use outcore_testkit::harness::{is_child, scene_ended, whole_name};
use safetensors::SafeTensors;

use super::*;

/// Layers of a few MiB each, 60 MiB in all, whose bytes have no pattern.
fn write(path: &Path) {
    let mut at = 0;
    let mut entries = Vec::new();
    for layer in 0..24_u64 {
        let rows = 600 + 8 * layer;
        let (start, end) = (at, at + rows * 4096);
        entries.push(format!(
            r#""model.layers.{layer}.mlp.up_proj.weight":{{"dtype":"F32","shape":[{rows},1024],"data_offsets":[{start},{end}]}}"#
        ));
        at = end;
    }
    let header = format!("{{{}}}", entries.join(","));
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend_from_slice(header.as_bytes());
    let mut state = 7_u64;
    let end = bytes.len() + at as usize;
    while bytes.len() < end {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        bytes.extend_from_slice(&state.to_le_bytes());
    }
    std::fs::write(path, &bytes[..end]).unwrap();
}

#[test]
#[ignore = "the program of a test"]
fn child_maps_a_model_by_memmap2() {
    if !is_child("child_maps_a_model_by_memmap2") {
        return;
    }
    let path = std::env::var_os("OUTCORE_TEST_MODEL").unwrap();
    let file = File::open(&path).unwrap();
    // SAFETY: nobody writes the file while it is mapped.
    let mapped = unsafe { memmap2::MmapOptions::new().map(&file) }.unwrap();
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    assert!(!maps.contains(path.to_str().unwrap()), "the mapping is the kernel's");
    let tensors = SafeTensors::deserialize(&mapped).unwrap();
    for _ in 0..3 {
        for (name, tensor) in tensors.iter() {
            let start = tensor.data().as_ptr().addr() - mapped.as_ptr().addr();
            let mut expected = vec![0; tensor.data().len()];
            file.read_exact_at(&mut expected, start as u64).unwrap();
            assert!(tensor.data() == expected, "{name} has other bytes than the file");
        }
    }
    scene_ended();
}

#[test]
fn a_rust_program_that_maps_by_memmap2_reads_the_same_bytes() {
    if !can_run() {
        return;
    }
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path =
        folder.path().join("model.safetensors").canonicalize().unwrap_or(folder.path().join("model.safetensors"));
    write(&path);
    let child = "child_maps_a_model_by_memmap2";
    let output = outcore()
        .args(["run", "--budget", "12MiB", "--"])
        .arg(std::env::current_exe().unwrap())
        .args(["--exact", &whole_name(child), "--nocapture", "--include-ignored"])
        .env("OUTCORE_SCENE", child)
        .env("OUTCORE_TEST_MODEL", &path)
        .output()
        .unwrap();
    let [said, told] = [&output.stdout, &output.stderr].map(|text| String::from_utf8_lossy(text).into_owned());
    assert!(output.status.success() && said.contains("the child ran"), "{:?}: {said}{told}", output.status);
    assert!(told.contains("1 file(s) mapped, model.safetensors"), "{told}");
}

/// Uses each page of a file once in an order that nothing tells, several times.
const SHUFFLED: &str = r#"
import mmap, random, sys

file = open(sys.argv[1], "rb")
one = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
order = list(range(0, len(one) - 4096, 2 << 20))
random.Random(3).shuffle(order)
for _ in range(24):
    for at in order:
        file.seek(at)
        assert one[at : at + 100] == file.read(100), at
print("all is equal")
"#;

#[test]
fn an_order_is_kept_for_the_next_start_unless_it_is_not_to_be() {
    use std::os::unix::fs::PermissionsExt;
    if !can_run() {
        return;
    }
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = model(folder.path(), 40 << 20);
    let start = |cache: &Path, options: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_outcore"));
        command.env("XDG_CACHE_HOME", cache).args(["run", "--budget", "16MiB"]).args(options);
        let output = command.args(["--", "python3", "-c", SHUFFLED]).arg(&path).output().unwrap();
        assert_eq!(String::from_utf8_lossy(&output.stdout), "all is equal\n", "{output:?}");
    };
    let notes = |cache: &Path| {
        let all = std::fs::read_dir(cache.join("outcore")).into_iter().flatten().flatten();
        all.filter(|note| note.file_name().to_string_lossy().starts_with("order-")).collect::<Vec<_>>()
    };
    let cache = folder.path().join("off");
    start(&cache, &["--no-kept-order"]);
    assert!(notes(&cache).is_empty());
    let cache = folder.path().join("on");
    for _ in 0..2 {
        start(&cache, &[]);
        let kept = notes(&cache);
        assert_eq!(kept.len(), 1);
        assert_eq!(kept[0].metadata().unwrap().permissions().mode() & 0o777, 0o600);
    }
    // A folder that cannot be written changes nothing for the program.
    start(Path::new("/proc/none"), &[]);
}
