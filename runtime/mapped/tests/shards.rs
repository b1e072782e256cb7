//! The promise: a model in several files is used as one in one file is, and files that only look like parts of a model
//! give the right bytes all the same.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod common;

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use outcore::Runtime;
use outcore_mapped::live::{Order, told_of_order};
use outcore_mapped::{LayerExperts, MapOptions, Mapped};
use outcore_testkit::harness::{Rng, until};

use common::{PAGE, byte, folder, runtime};

/// A tensor: its file, where it begins there, and where its bytes begin among those of all tensors.
#[derive(Clone, Copy, Debug)]
struct Place {
    file: usize,
    offset: u64,
    byte: u64,
    len: u64,
}

/// A model of tensors with these names and lengths, the same number of them in each file.
struct Model {
    files: Vec<PathBuf>,
    places: Vec<Place>,
}

/// Writes such a model as safetensors, with an index if `indexed`.
fn write(folder: &Path, stem: &str, tensors: &[(String, u64)], files: usize, indexed: bool) -> Model {
    let (mut model, mut of_tensor) = (Model { files: Vec::new(), places: Vec::new() }, BTreeMap::new());
    let mut at = 0;
    for (file, tensors) in tensors.chunks(tensors.len().div_ceil(files)).enumerate() {
        let name = match files {
            1 => format!("{stem}.safetensors"),
            _ => format!("{stem}-{:05}-of-{files:05}.safetensors", file + 1),
        };
        let mut end = 0;
        let entries = tensors.iter().map(|(tensor, len)| {
            of_tensor.insert(tensor.clone(), name.clone());
            end += len;
            let (rows, start) = (len / PAGE, end - len);
            format!("\"{tensor}\":{{\"dtype\":\"U8\",\"shape\":[{rows},{PAGE}],\"data_offsets\":[{start},{end}]}}")
        });
        let header = format!("{{{}}}", entries.collect::<Vec<_>>().join(","));
        let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
        bytes.extend(header.as_bytes());
        for (_, len) in tensors {
            model.places.push(Place { file, offset: bytes.len() as u64, byte: at, len: *len });
            bytes.extend((at..at + len).map(byte));
            at += len;
        }
        let path = folder.join(&name);
        fs::write(&path, bytes).unwrap();
        model.files.push(path);
    }
    if indexed {
        index(&folder.join(format!("{stem}.safetensors.index.json")), &of_tensor);
    }
    model
}

fn index(path: &Path, of_tensor: &BTreeMap<String, String>) {
    let entries = of_tensor.iter().map(|(tensor, file)| format!("\"{tensor}\":\"{file}\""));
    fs::write(path, format!("{{\"weight_map\":{{{}}}}}", entries.collect::<Vec<_>>().join(","))).unwrap();
}

fn is_found_in_turn(order: Order) -> bool {
    matches!(order, Order::InTurn { pass: Some(2..=4) } | Order::Found { .. })
}

/// Layers whose names sort otherwise than they are used, of five pages each.
fn layers(count: u64) -> Vec<(String, u64)> {
    let mut layers: Vec<u64> = (0..count).collect();
    layers.sort_by_key(|layer| layer.to_string());
    let of_layer = |layer| {
        let name = |part| format!("model.layers.{layer}.{part}.weight");
        [(name("mlp.up_proj"), 3 * PAGE), (name("self_attn.q_proj"), 2 * PAGE)]
    };
    layers.into_iter().flat_map(of_layer).collect()
}

/// The tensors in the order in which a pass uses them.
fn in_order(tensors: &[(String, u64)]) -> Vec<usize> {
    let place = |at: &usize| {
        let name = &tensors[*at].0;
        let layer: u64 = name.split('.').nth(2).unwrap().parse().unwrap();
        (layer, u64::from(!name.contains("self_attn")))
    };
    let mut order: Vec<usize> = (0..tensors.len()).collect();
    order.sort_by_key(place);
    order
}

impl Model {
    fn map(&self, options: &MapOptions, runtime: &Runtime) -> Vec<Mapped> {
        self.files.iter().map(|path| options.open(runtime, path).unwrap()).collect()
    }

    /// Looks at a byte of each page of a tensor.
    fn uses(&self, mapped: &[Mapped], tensor: usize) {
        let place = self.places[tensor];
        for at in (0..place.len).step_by(PAGE as usize / 2) {
            assert_eq!(mapped[place.file][(place.offset + at) as usize], byte(place.byte + at), "{place:?}");
        }
    }

    /// Uses tensors in this order. Returns how many uses found their page neither there nor on its way.
    fn pass(&self, runtime: &Runtime, mapped: &[Mapped], order: &[usize]) -> u64 {
        let before = runtime.stats().pager.faults;
        order.iter().for_each(|tensor| self.uses(mapped, *tensor));
        runtime.stats().pager.faults - before
    }
}

#[test]
fn a_model_in_several_files_is_used_as_in_one() {
    let folder = folder();
    let tensors = layers(64);
    let order = in_order(&tensors);
    let mut ratios = Vec::new();
    for (files, indexed) in [(1, false), (4, true), (4, false), (16, true)] {
        let model = write(folder.path(), &format!("m{files}{indexed}"), &tensors, files, indexed);
        let Some(runtime) = runtime(110) else { return };
        let mapped = model.map(&MapOptions::new().keep_order(false), &runtime);
        let whole = mapped[0].whole();
        assert_eq!((whole.files, whole.mapped, whole.order), (files as u64, files as u64, Order::OfHeaders));
        assert!(mapped.iter().all(|other| other.is_of_model_of(&mapped[0]) && other.whole() == whole));
        let faults: Vec<u64> = (0..6).map(|_| model.pass(&runtime, &mapped, &order)).collect();
        // The headers give the order, so all but the first pages come before they are touched.
        assert!(faults.iter().all(|faults| *faults < 30), "{files} files: {faults:?}");
        ratios.push(runtime.stats().hit_ratio());
        drop(mapped);
        runtime.close().unwrap();
    }
    // 110 of some 320 pages stay, but for those that stream.
    assert!(ratios.iter().all(|ratio| (ratio - ratios[0]).abs() < 0.04 && *ratio > 0.2), "{ratios:?}");
}

#[test]
fn an_order_across_files_is_learned_and_known_the_next_time() {
    let folder = folder();
    let tensors = layers(60);
    let model = write(folder.path(), "model", &tensors, 4, true);
    let mut random = Rng::new(7);
    let mut order = in_order(&tensors);
    for at in (1..order.len()).rev() {
        order.swap(at, random.below(at as u64 + 1) as usize);
    }
    let notes = folder.path().join("notes");
    let start = |passes: usize| {
        let runtime = runtime(100)?;
        let mapped = model.map(&MapOptions::new().orders_in(&notes), &runtime);
        let before = mapped[1].whole().order;
        let faults: Vec<u64> = (0..passes).map(|_| model.pass(&runtime, &mapped, &order)).collect();
        let known = mapped[1].whole().order;
        drop(mapped);
        runtime.close().unwrap();
        Some((before, known, faults))
    };
    let Some((before, found, faults)) = start(6) else { return };
    assert_eq!(before, Order::OfHeaders);
    assert!(matches!(found, Order::Found { pass: 1..=3 }), "{found:?}");
    assert!(faults[3..].iter().all(|faults| *faults < 17), "{faults:?}");
    // One note, of all files.
    assert_eq!(fs::read_dir(&notes).unwrap().count(), 1);
    let (before, _, faults) = start(2).unwrap();
    assert_eq!(before, Order::Kept);
    assert!(faults.iter().all(|faults| *faults < 17), "{faults:?}");
    // A file that is replaced makes another model of it.
    let bytes = fs::read(&model.files[2]).unwrap();
    fs::remove_file(&model.files[2]).unwrap();
    fs::write(&model.files[2], bytes).unwrap();
    assert_eq!(start(1).unwrap().0, Order::OfHeaders);
}

/// Whoever reads a model from its first byte to its last one reads each once, whatever its layers are called. `false`
/// where nothing can be mapped.
fn a_scan_reads_little_twice(model: &Model, what: &str) -> bool {
    for frames in [60, 300] {
        let Some(runtime) = runtime(frames) else { return false };
        let mapped = model.map(&MapOptions::new().keep_order(false), &runtime);
        let bytes: u64 = mapped.iter().map(|file| file.len() as u64).sum();
        for (file, path) in mapped.iter().zip(&model.files) {
            assert!(file[..] == fs::read(path).unwrap());
        }
        let read = runtime.stats().traffic.disk_read.get();
        eprintln!("{what}, {frames} frames: {:.3}", read as f64 / bytes as f64);
        // A few reads ahead are in vain until it is noticed.
        assert!(read <= bytes + bytes / 20 + 8 * PAGE, "{what}, {frames}: {read} of {bytes}");
        drop(mapped);
        runtime.close().unwrap();
    }
    true
}

#[test]
fn a_scan_by_offset_reads_little_twice() {
    let folder = folder();
    for (count, files) in [(64, 1), (256, 1), (256, 4)] {
        let model = write(folder.path(), &format!("model{count}"), &layers(count), files, true);
        if !a_scan_reads_little_twice(&model, &format!("{count} layers, {files} files")) {
            return;
        }
    }
}

#[test]
fn a_scan_by_offset_is_noticed_within_a_fiftieth_of_the_model() {
    let folder = folder();
    let model = write(folder.path(), "model", &layers(256), 1, true);
    for frames in [60, 300] {
        let Some(runtime) = runtime(frames) else { return };
        let mapped = model.map(&MapOptions::new().keep_order(false), &runtime);
        let pages = mapped[0].chunks(PAGE as usize).map(|page| std::hint::black_box(page[0]));
        let noticed = pages.map(|_| mapped[0].whole().order).position(|order| order == Order::ByOffset).unwrap();
        let all = mapped[0].len() / PAGE as usize;
        assert!(noticed <= all / 50, "{frames} frames: on page {noticed} of {all}");
        drop(mapped);
        runtime.close().unwrap();
    }
}

/// A program reads the headers of all files first, so a scan has no fault on the first page of any.
#[test]
fn regression_a_scan_is_noticed_where_headers_are_there() {
    let folder = folder();
    let mut tensors: Vec<(String, u64)> =
        (0..48).map(|layer| (format!("model.layers.{layer}.mlp.up_proj.weight"), 6 * PAGE)).collect();
    tensors.sort_by_key(|(name, _)| name.clone());
    let model = write(folder.path(), "model", &tensors, 4, true);
    let Some(runtime) = runtime(150) else { return };
    let mapped = model.map(&MapOptions::new().keep_order(false), &runtime);
    let read = |page: &[u8]| std::hint::black_box(page[0]);
    mapped.iter().for_each(|file| _ = read(file));
    let pages = mapped.iter().flat_map(|file| file.chunks(PAGE as usize).map(read));
    let noticed = pages.map(|_| mapped[0].whole().order).position(|order| order == Order::ByOffset);
    assert!(noticed.is_some_and(|page| page < 150), "on page {noticed:?} of 292");
    drop(mapped);
    runtime.close().unwrap();
}

/// Each file is mapped when it is read, as a loader does that goes through them.
#[test]
fn regression_a_scan_over_files_that_are_mapped_one_by_one_reads_little_twice() {
    let folder = folder();
    let model = write(folder.path(), "model", &layers(480), 48, true);
    let Some(runtime) = runtime(60) else { return };
    let pages = |path: &PathBuf| fs::metadata(path).unwrap().len().div_ceil(PAGE);
    let all: u64 = model.files.iter().map(pages).sum();
    let options = MapOptions::new().keep_order(false);
    let mut mapped = Vec::new();
    for path in &model.files {
        let file = options.open(&runtime, path).unwrap();
        let bytes = fs::read(path).unwrap();
        assert!(file.iter().eq(&bytes), "{}", path.display());
        mapped.push(file);
    }
    let whole = mapped[0].whole();
    assert_eq!((whole.mapped, whole.order), (48, Order::ByOffset), "{whole:?}");
    let read = runtime.stats().traffic.disk_read.get() / PAGE;
    assert!(read <= all + all / 20 + 8, "{read} pages were read of {all}");
    drop(mapped);
    runtime.close().unwrap();
}

/// In the cache of a model hub files are named by their hashes, and links lead to them.
#[test]
fn regression_files_that_links_lead_to_are_one_model() {
    let folder = folder();
    let tensors = layers(32);
    let hub = folder.path().join("models--a--b");
    let (blobs, snapshot) = (hub.join("blobs"), hub.join("snapshots/0123"));
    fs::create_dir_all(&blobs).unwrap();
    fs::create_dir_all(&snapshot).unwrap();
    let model = write(&snapshot, "model", &tensors, 4, true);
    for (number, path) in model.files.iter().enumerate() {
        fs::rename(path, blobs.join(format!("{number}9f3c"))).unwrap();
        std::os::unix::fs::symlink(format!("../../blobs/{number}9f3c"), path).unwrap();
    }
    // By their links, and as open files, whose names are those of the hashes.
    let Some(runtime) = runtime(60) else { return };
    let mapped = model.map(&MapOptions::new().keep_order(false), &runtime);
    let open: Vec<Mapped> = model.files.iter().map(|path| Mapped::map(&File::open(path).unwrap()).unwrap()).collect();
    for files in [&mapped, &open] {
        let whole = files[0].whole();
        assert_eq!((whole.files, whole.mapped, whole.order), (4, 4, Order::OfHeaders), "{whole:?}");
        model.pass(&runtime, files, &in_order(&tensors));
    }
    drop((mapped, open));
    runtime.close().unwrap();
}

/// One of a model's files is replaced while it is mapped: what is mapped stays what it was.
#[test]
fn a_file_of_a_model_that_is_replaced_keeps_its_bytes() {
    let folder = folder();
    let tensors = layers(32);
    let model = write(folder.path(), "model", &tensors, 4, true);
    let Some(runtime) = runtime(60) else { return };
    let options = MapOptions::new().keep_order(false);
    let mapped = model.map(&options, &runtime);
    let order = in_order(&tensors);
    model.pass(&runtime, &mapped, &order);
    let aside = folder.path().join("aside");
    fs::copy(&model.files[1], &aside).unwrap();
    File::options().write(true).open(&aside).unwrap().write_all_at(&[1; 64], 1 << 16).unwrap();
    fs::rename(&aside, &model.files[1]).unwrap();
    for _ in 0..2 {
        model.pass(&runtime, &mapped, &order);
    }
    // What is there now is another file, which is no part of the model as it was.
    let now = options.open(&runtime, &model.files[1]).unwrap();
    assert_eq!(now[1 << 16..][..64], [1; 64]);
    assert!(!now.is_of_model_of(&mapped[0]));
    let told = told_of_order([("now", &now.whole())]);
    assert!(told.starts_with("The order of use of 1 file (its model has 4) "), "{told}");
    drop((mapped, now));
    runtime.close().unwrap();
}

/// Files that join late, leave, and come again, while others are used.
#[test]
fn files_join_and_leave_in_any_order() {
    let folder = folder();
    let tensors = layers(32);
    let model = write(folder.path(), "model", &tensors, 8, true);
    let order = in_order(&tensors);
    let Some(runtime) = runtime(60) else { return };
    let options = MapOptions::new().orders_in(folder.path().join("notes"));
    let mut random = Rng::new(3);
    let mut mapped: Vec<Vec<Mapped>> = (0..8).map(|_| Vec::new()).collect();
    for round in 0..60 {
        let file = random.below(8) as usize;
        match random.below(3) {
            0 => drop(mapped[file].pop()),
            _ if mapped[file].len() < 3 => mapped[file].push(options.open(&runtime, &model.files[file]).unwrap()),
            _ => {}
        }
        for tensor in &order {
            let place = model.places[*tensor];
            // Of a file that is mapped several times, any mapping.
            let Some(one) = mapped[place.file].get(round % mapped[place.file].len().max(1)) else { continue };
            let at = random.below(place.len);
            assert_eq!(one[(place.offset + at) as usize], byte(place.byte + at), "{place:?} in round {round}");
        }
    }
    // Each mapping of a file is in a model of its own, with those of other files.
    let count = mapped.iter().map(Vec::len).max().unwrap();
    let mut ids: Vec<u64> = mapped.iter().flatten().map(|mapped| mapped.whole().id).collect();
    ids.sort_unstable();
    ids.dedup();
    assert!(ids.len() >= count && ids.len() <= 8, "{ids:?}, {count}");
    drop(mapped);
    runtime.close().unwrap();
}

#[test]
fn what_only_looks_like_a_part_is_alone_and_reads_right() {
    let tensors = layers(16);
    let order = in_order(&tensors);
    let reads = |model: &Model, mapped: &[Mapped]| {
        order.iter().filter(|tensor| model.places[**tensor].file < mapped.len()).for_each(|at| model.uses(mapped, *at));
    };
    let Some(runtime) = runtime(30) else { return };
    let options = MapOptions::new().keep_order(false);
    let why = |mapped: &Mapped| mapped.whole().alone.unwrap_or_default();

    // A shard is missing.
    let folder = folder();
    let mut model = write(folder.path(), "model", &tensors, 4, true);
    fs::remove_file(model.files.pop().unwrap()).unwrap();
    let mapped = model.map(&options, &runtime);
    assert!(mapped.iter().all(|one| one.whole().files == 1), "{:?}", mapped[0].whole());
    assert!(why(&mapped[0]).contains("model-00004-of-00004.safetensors"), "{}", why(&mapped[0]));
    reads(&model, &mapped);
    drop(mapped);

    // Shards of two models in one folder: each has its own.
    let folder = common::folder();
    let (one, other) = (write(folder.path(), "a", &tensors, 4, false), write(folder.path(), "b", &tensors, 4, true));
    let (ones, others) = (one.map(&options, &runtime), other.map(&options, &runtime));
    assert!((0..4).all(|at| ones[at].is_of_model_of(&ones[0]) && others[at].is_of_model_of(&others[0])));
    assert!(!ones[0].is_of_model_of(&others[0]));
    reads(&one, &ones);
    reads(&other, &others);
    drop((ones, others));

    // Names that say nothing, and an index that names them.
    let folder = common::folder();
    let (mut model, mut names) = (write(folder.path(), "model", &tensors, 2, false), BTreeMap::new());
    for (path, name) in model.files.iter_mut().zip(["first.safetensors", "second.safetensors"]) {
        let to = folder.path().join(name);
        fs::rename(&path, &to).unwrap();
        *path = to;
    }
    for (tensor, place) in tensors.iter().zip(&model.places) {
        names.insert(tensor.0.clone(), ["first.safetensors", "second.safetensors"][place.file].to_owned());
    }
    index(&folder.path().join("any.safetensors.index.json"), &names);
    let mapped = model.map(&options, &runtime);
    assert_eq!((mapped[0].whole().files, mapped[1].is_of_model_of(&mapped[0])), (2, true));
    reads(&model, &mapped);
    drop(mapped);

    // An index that names a file outside of the folder.
    names.values_mut().filter(|name| **name == "second.safetensors").for_each(|name| *name = "../x/second".to_owned());
    index(&folder.path().join("any.safetensors.index.json"), &names);
    let Some(other) = common::runtime(30) else { return };
    let mapped = model.map(&options, &other);
    assert_eq!((mapped[0].whole().files, mapped[1].is_of_model_of(&mapped[0])), (1, false));
    assert!(
        ["any.safetensors.index.json", "../x/second"].iter().all(|part| why(&mapped[0]).contains(part)),
        "{}",
        why(&mapped[0])
    );
    reads(&model, &mapped);
    drop(mapped);
    other.close().unwrap();

    // One shard under two names.
    let folder = common::folder();
    let model = write(folder.path(), "model", &tensors, 2, false);
    fs::remove_file(&model.files[1]).unwrap();
    fs::hard_link(&model.files[0], &model.files[1]).unwrap();
    let mapped = model.map(&options, &runtime);
    assert!(!mapped[1].is_of_model_of(&mapped[0]), "{:?}", mapped[0].whole());
    assert!(why(&mapped[0]).contains(" appears twice "), "{}", why(&mapped[0]));
    order.iter().filter(|at| model.places[**at].file == 0).for_each(|at| model.uses(&mapped, *at));
    drop(mapped);
    runtime.close().unwrap();
}

/// A program maps one shard, and reads the others in another way: nothing of these is read ahead.
#[test]
fn of_files_that_are_not_mapped_nothing_is_read() {
    let folder = folder();
    let tensors = layers(40);
    let model = write(folder.path(), "model", &tensors, 4, true);
    let order: Vec<usize> = in_order(&tensors);
    let Some(runtime) = runtime(30) else { return };
    let mapped = [MapOptions::new().keep_order(false).open(&runtime, &model.files[0]).unwrap()];
    let here: Vec<usize> = order.iter().copied().filter(|tensor| model.places[*tensor].file == 0).collect();
    for _ in 0..4 {
        for tensor in &order {
            let place = model.places[*tensor];
            if place.file == 0 {
                model.uses(&mapped, *tensor);
            } else {
                let mut read = vec![0; place.len as usize];
                File::open(&model.files[place.file]).unwrap().read_exact_at(&mut read, place.offset).unwrap();
                assert!(read.iter().zip(place.byte..).all(|(found, at)| *found == byte(at)));
            }
        }
    }
    let whole = mapped[0].whole();
    assert_eq!((whole.files, whole.mapped), (4, 1));
    let told = told_of_order([("one", &whole)]);
    assert!(told.starts_with("The order of use of 1 file (its model has 4) "), "{told}");
    // The file has 50 pages of tensors, of which passes use all.
    assert_eq!(here.len(), 20);
    assert!(runtime.stats().traffic.disk_read.get() <= 4 * 54 * PAGE, "{:?}", runtime.stats().traffic);
    drop(mapped);
    runtime.close().unwrap();
}

const EXPERTS: u64 = 16;

/// Layers of experts with two matrices each. In files, all of `up` of a layer come first, then all of `down`.
fn experts(layers: u64) -> Vec<(String, u64)> {
    let of_layer = |layer| {
        let of_part = move |part| {
            (0..EXPERTS)
                .map(move |expert| (format!("model.layers.{layer}.mlp.experts.{expert}.{part}.weight"), 3 * PAGE))
        };
        ["up_proj", "down_proj"].into_iter().flat_map(of_part)
    };
    (0..layers).flat_map(of_layer).collect()
}

#[test]
fn a_scan_over_experts_reads_little_twice() {
    let folder = folder();
    a_scan_reads_little_twice(&write(folder.path(), "model", &experts(12), 2, true), "experts");
}

/// A layer's matrices lie in two files, as they do where a shard ends in the middle of a layer.
#[test]
fn experts_come_whole_from_two_files() {
    let folder = folder();
    let sorted = experts(6);
    let model = write(folder.path(), "model", &sorted, 4, true);
    let at = |layer: u64, expert: u64, part: &str| {
        let name = format!("model.layers.{layer}.mlp.experts.{expert}.{part}.weight");
        sorted.iter().position(|(tensor, _)| *tensor == name).unwrap()
    };
    let [up, down] = ["up_proj", "down_proj"].map(|part| model.places[at(1, 5, part)].file);
    assert_ne!(up, down, "the second layer lies in two files");
    let Some(runtime) = runtime(160) else { return };
    let mapped = model.map(&MapOptions::new().keep_order(false), &runtime);
    assert!(mapped.iter().all(|one| one.has_experts() && one.has_expert(5, 15) && !one.has_expert(6, 0)));
    let mut random = Rng::new(1);
    for round in 0..30 {
        for layer in 0..6 {
            let experts = [random.below(EXPERTS), random.below(EXPERTS)];
            let told = experts.map(|expert| expert as u32);
            // Any file of the model may be asked.
            let one = &mapped[random.below(4) as usize];
            match round % 2 {
                0 => one.expert_hint(layer as u32, &told).unwrap(),
                _ => {
                    let next = LayerExperts { layer: (layer as u32 + 1) % 6, experts: &[3, 4] };
                    one.expert_hint_before(LayerExperts { layer: layer as u32, experts: &told }, &[next]).unwrap();
                }
            }
            for expert in experts {
                for part in ["up_proj", "down_proj"] {
                    model.uses(&mapped, at(layer, expert, part));
                }
            }
        }
    }
    let counted =
        mapped.iter().map(Mapped::experts).fold(Default::default(), |mut sum: outcore_mapped::live::Experts, one| {
            sum += one;
            sum
        });
    assert_eq!((counted.hints, counted.touched), (30 * 6, 0), "{counted:?}");
    drop(mapped);
    runtime.close().unwrap();
}

/// Models of one file each, which one thread uses in turn.
#[test]
fn files_that_are_used_in_turn_have_one_order() {
    let folder = folder();
    let tensors = layers(16);
    let order = in_order(&tensors);
    let models: Vec<Model> = (0..4).map(|n| write(folder.path(), &format!("model{n}"), &tensors, 1, false)).collect();
    let raw: Vec<PathBuf> = (0..4)
        .map(|n| {
            let path = folder.path().join(format!("raw{n}"));
            fs::write(&path, (0..80 * PAGE).map(byte).collect::<Vec<u8>>()).unwrap();
            path
        })
        .collect();
    for is_model in [true, false] {
        let Some(runtime) = runtime(110) else { return };
        let options = MapOptions::new().orders_in(folder.path().join("notes"));
        let mapped: Vec<Vec<Mapped>> = match is_model {
            true => models.iter().map(|model| model.map(&options, &runtime)).collect(),
            false => raw.iter().map(|path| vec![options.open(&runtime, path).unwrap()]).collect(),
        };
        let ratio = |passes: u64| {
            let before = runtime.stats().pager;
            for _ in 0..passes {
                for (file, model) in mapped.iter().zip(&models) {
                    match is_model {
                        true => order.iter().for_each(|tensor| model.uses(file, *tensor)),
                        false => (0..80)
                            .rev()
                            .for_each(|page| assert_eq!(file[0][(page * PAGE) as usize], byte(page * PAGE))),
                    }
                }
            }
            let now = runtime.stats().pager;
            (now.hits - before.hits) as f64 / (now.uses - before.uses).max(1) as f64
        };
        let learning = ratio(4);
        // They are joined by a thread of its own.
        until("files in turn", || mapped[0][0].whole().ordered == 4);
        let whole = mapped[0][0].whole();
        assert!(is_found_in_turn(whole.order), "{whole:?}");
        assert!(mapped.iter().all(|file| file[0].whole().id == whole.id));
        let found = ratio(4);
        // Of 320 pages 110 have frames, some of which stream.
        assert!(found > 0.22, "{is_model}: {learning:.3}, {found:.3}");
        drop(mapped);
        // And the next time as soon as all are mapped.
        let mapped: Vec<Mapped> = match is_model {
            true => models.iter().flat_map(|model| model.map(&options, &runtime)).collect(),
            false => raw.iter().map(|path| options.open(&runtime, path).unwrap()).collect(),
        };
        let whole = mapped[3].whole();
        assert_eq!((whole.ordered, whole.order), (4, Order::InTurn { pass: None }), "{learning:.3}");
        drop(mapped);
        runtime.close().unwrap();
    }
}

/// Of models that were used in turn some go, and another one takes part.
#[test]
fn regression_what_is_left_of_files_in_turn_is_numbered_anew() {
    let folder = folder();
    let tensors = layers(16);
    let order = in_order(&tensors);
    let models: Vec<Model> = (0..3).map(|n| write(folder.path(), &format!("model{n}"), &tensors, 1, false)).collect();
    let Some(runtime) = runtime(60) else { return };
    let options = MapOptions::new().keep_order(false);
    let mut mapped: Vec<Option<Vec<Mapped>>> = vec![None, None, None];
    let turns = |mapped: &[Option<Vec<Mapped>>], of: [usize; 2]| {
        for _ in 0..5 {
            for n in of {
                let files = mapped[n].as_ref().unwrap();
                order.iter().for_each(|tensor| models[n].uses(files, *tensor));
            }
        }
        until("files in turn", || mapped[of[1]].as_ref().unwrap()[0].whole().ordered > 1);
        let [one, other] = of.map(|n| mapped[n].as_ref().unwrap()[0].whole());
        assert_eq!(one.id, other.id, "{one:?}, {other:?}");
    };
    for n in [0, 1] {
        mapped[n] = Some(models[n].map(&options, &runtime));
    }
    turns(&mapped, [0, 1]);
    mapped[0] = None;
    mapped[2] = Some(models[2].map(&options, &runtime));
    turns(&mapped, [1, 2]);
    // A round of some 160 uses, whose order is that of the headers, one behind the other.
    let faults: Vec<u64> = [1, 2, 1, 2].map(|n| models[n].pass(&runtime, mapped[n].as_ref().unwrap(), &order)).to_vec();
    assert!(faults[2..].iter().sum::<u64>() < 40, "{faults:?}");
    drop(mapped);
    runtime.close().unwrap();
}

/// Two threads go over a file each: these have nothing to do with one another.
#[test]
fn files_of_two_threads_keep_their_orders() {
    let folder = folder();
    let tensors = layers(32);
    let order = in_order(&tensors);
    let models: Vec<Model> = (0..2).map(|n| write(folder.path(), &format!("model{n}"), &tensors, 1, false)).collect();
    let Some(runtime) = runtime(120) else { return };
    let options = MapOptions::new().keep_order(false);
    let mapped: Vec<Vec<Mapped>> = models.iter().map(|model| model.map(&options, &runtime)).collect();
    std::thread::scope(|scope| {
        for (model, files) in models.iter().zip(&mapped) {
            scope.spawn(|| (0..20).for_each(|_| order.iter().for_each(|tensor| model.uses(files, *tensor))));
        }
    });
    assert_eq!(mapped[0][0].whole().ordered, 1);
    assert!(runtime.stats().hit_ratio() > 0.2, "{:?}", runtime.stats().pager);
    drop(mapped);
    runtime.close().unwrap();
}
