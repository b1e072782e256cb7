//! Which files share an order of use: those of a model, and models that are used in turn.

use std::collections::HashMap;
use std::path::Path;
use std::sync::{Arc, Weak};
use std::thread;

use outcore::{Result, Runtime, Tensor};

use crate::device::Core;
use crate::live::Order;
use crate::model::{Model, Part};
use crate::options::MapOptions;
use crate::outline::Outline;
use crate::remembered::Identity;
use crate::row::{Members, Row};
use crate::uses::Uses;

/// Outlines that are kept while no file of theirs is mapped: a program may map one file after the other.
const OUTLINES_MAX: usize = 8;

/// Finds the model that has this file, which was mapped as `bytes`, and adds the file to it. Files that are mapped to
/// be written are apart from others, and so is a file that the model has already. Returns the file's number in the
/// model.
///
/// # Errors
/// As for [`Runtime::walker`].
pub fn join(
    runtime: &Runtime,
    core: &Core,
    (path, identity): (&Path, Identity),
    bytes: &Tensor,
    private: bool,
    options: &MapOptions,
) -> Result<(Arc<Model>, usize)> {
    let has = |outline: &Outline| outline.files.iter().position(|file| *file == identity);
    let known = core.models.lock().outlines.iter().find_map(|outline| Some((outline.clone(), has(outline)?)));
    let (outline, file) = known.unwrap_or_else(|| {
        // Other files may be mapped meanwhile: their headers are read here.
        let (outline, file) = Outline::of(path, identity, core.page());
        (Arc::new(outline), file)
    });
    let mut models = core.models.lock();
    // What was read last comes first: of a model of which a file was replaced, that is what is true.
    models.outlines.retain(|other| !Arc::ptr_eq(other, &outline));
    models.outlines.push_front(outline.clone());
    models.outlines.truncate(OUTLINES_MAX);
    models.live.retain(|model| model.strong_count() > 0);
    for model in models.live.iter().filter_map(Weak::upgrade) {
        let fits = model.outline.files == outline.files && model.is_mapped_as(private, options);
        if fits && model.join(file, bytes) {
            return Ok((model, file));
        }
    }
    let outline = if options.is_announced() { Arc::new(outline.without_order()) } else { outline };
    let model = Arc::new(Model::new(runtime, core.page(), outline, private, options)?);
    model.join(file, bytes);
    models.live.push(Arc::downgrade(&model));
    let live: Vec<Arc<Model>> = models.live.iter().filter_map(Weak::upgrade).collect();
    join_as_before(runtime, core, &live);
    Ok((model, file))
}

/// The orders of these numbers are used in turn: they are joined soon, on a thread of its own, because notes are read
/// and written then. Whoever calls this waits for nobody.
pub fn use_in_turn(runtime: &Runtime, core: &Arc<Core>, orders: Vec<u64>) {
    // They are seen again if they are not joined.
    core.turns.lock().forget();
    let (runtime, core) = (runtime.clone(), core.clone());
    let join = move || {
        let models = core.models.lock();
        let live: Vec<Arc<Model>> = models.live.iter().filter_map(Weak::upgrade).collect();
        match join_in_turn(&runtime, &core, &live, &orders, true) {
            Ok(Some(joined)) => keep_turns(&joined),
            // One of them is just being dropped.
            Ok(None) => {}
            Err(error) => tracing::debug!(%error, "files that are used in turn keep their own orders"),
        }
    };
    if let Err(cause) = thread::Builder::new().name("outcore-order".to_owned()).spawn(join) {
        tracing::debug!(%cause, "files that are used in turn are not joined");
    }
}

/// Joins the orders of these numbers, of models that are used in turn. Returns the models; `None` if an order is gone.
/// The caller has the lock of all models. Waits for the disk.
///
/// # Errors
/// As for [`Runtime::walker`].
fn join_in_turn(
    runtime: &Runtime,
    core: &Core,
    live: &[Arc<Model>],
    orders: &[u64],
    was_seen: bool,
) -> Result<Option<Vec<Arc<Model>>>> {
    let (mut all, mut files, mut header, mut pages) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    let (mut used, mut of_pass) = (0, 0);
    for order in orders {
        let mut of_order: Vec<(Part, &Arc<Model>)> = live.iter().map(|model| (model.part(), model)).collect();
        of_order.retain(|(part, _)| part.id() == *order);
        of_order.sort_by_key(|(part, _)| part.file);
        let Some((Part { uses, .. }, _)) = of_order.first().cloned() else { return Ok(None) };
        // By their numbers in this order. Models that had part in it may be gone.
        let mut renumbered = HashMap::new();
        let before = pages.len();
        for (part, model) in of_order {
            let of_model = &model.outline.files;
            renumbered.extend((0..of_model.len()).map(|number| (part.file + number, files.len() + number)));
            files.extend(of_model);
            pages.extend(of_model.iter().map(|file| file.len.div_ceil(core.page())));
            all.push(model.clone());
        }
        let known = uses.known_order().into_iter();
        header.extend(known.filter_map(|(file, bytes)| Some((*renumbered.get(&file)?, bytes))));
        used += uses.count();
        of_pass += uses.pass().unwrap_or_else(|| pages[before..].iter().sum());
        // Its orders are its models' own, if they are used alone another time.
        uses.keep(runtime);
    }
    let (Some(first), Some(row)) = (all.first(), Row::of(pages)) else { return Ok(None) };
    let keep_alike = all.iter().all(|model| model.options.keeps_as(&first.options));
    let place = if keep_alike { first.options.place(&files, &row, core.page()) } else { None };
    let members = Arc::new(Members::new(row, core.page()));
    let pass = used.div_ceil(of_pass.max(1)).max(1);
    let told_by = Order::InTurn { pass: was_seen.then_some(pass) };
    let uses = Arc::new(Uses::new(runtime.walker()?, &members, (header, told_by), used, place));
    let mut file = 0;
    for model in &all {
        for (number, bytes) in model.members.mapped() {
            uses.join(file + number, &bytes);
        }
        model.take_part(Part { uses: uses.clone(), file, page: members.row().first(file) });
        file += model.outline.files.len();
    }
    uses.begin();
    Ok(Some(all))
}

/// Keeps for the next start that these models are used in turn.
fn keep_turns(models: &[Arc<Model>]) {
    let alike = |first: &&Arc<Model>| models.iter().all(|model| model.is_mapped_as(first.private, &first.options));
    let files: Vec<Identity> = models.iter().filter_map(|model| model.outline.files.first().copied()).collect();
    let place = models.first().filter(alike).and_then(|first| first.turns_place());
    if let Some(Err(cause)) = place.map(|place| place.write(&files)) {
        tracing::debug!(%cause, "which files are used in turn is not kept for the next start");
    }
}

/// Joins models that were used in turn in an earlier run, as soon as all of them are here. The caller has the lock of
/// all models.
fn join_as_before(runtime: &Runtime, core: &Core, live: &[Arc<Model>]) {
    // Not those that have been joined.
    let alone = |model: &&Arc<Model>| model.part().uses.members().row().files() == model.outline.files.len();
    let alone: Vec<&Arc<Model>> = live.iter().filter(alone).collect();
    for first in &alone {
        let Some(in_turn) = &first.in_turn else { continue };
        let alike = alone.iter().filter(|model| model.is_mapped_as(first.private, &first.options));
        let likely: Vec<(Identity, u64)> =
            alike.filter_map(|model| Some((*model.outline.files.first()?, model.part().id()))).collect();
        let Some(orders) = in_turn.pick(&likely) else { continue };
        if let Err(error) = join_in_turn(runtime, core, live, &orders, false) {
            tracing::debug!(%error, "files that were used in turn before keep their own orders");
        }
        return;
    }
}

impl Model {
    /// A file is mapped no more.
    pub fn leave(&self, core: &Core, file: usize) {
        // What is used in turn changes under this lock.
        let models = core.models.lock();
        let part = self.part();
        part.uses.leave(part.file + file);
        self.members.leave(file);
        drop(models);
        core.turns.lock().forget();
    }
}
