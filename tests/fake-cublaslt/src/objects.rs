//! The objects that programs have made, by number. A number is never used again.

use std::collections::HashMap;
use std::sync::LazyLock;

use parking_lot::{Mutex, MutexGuard};

use crate::abi::*;
use crate::descriptors::{Desc, Layout, Preference};
use crate::product::Module;
use crate::rules::Shape;

pub enum Object {
    Handle(Module),
    Desc(Desc),
    Layout(Layout),
    Preference(Preference),
}

/// What tests ask for.
pub struct Counts {
    pub heuristics: u64,
    pub products: u64,
    pub least_alignment: u64,
    pub batches: u64,
}

impl Default for Counts {
    fn default() -> Self {
        Self { heuristics: 0, products: 0, least_alignment: 256, batches: 0 }
    }
}

pub struct Objects {
    all: HashMap<u64, Object>,
    last: u64,
    refused: u32,
    pub counts: Counts,
}

static OBJECTS: LazyLock<Mutex<Objects>> = LazyLock::new(|| {
    let refused = std::env::var("FAKECUBLASLT_REFUSE").ok().and_then(|text| text.parse().ok());
    // Numbers that lead nowhere if they are taken for addresses.
    Mutex::new(Objects { all: HashMap::new(), last: 0x10, refused: refused.unwrap_or(0), counts: Counts::default() })
});

pub fn lock() -> MutexGuard<'static, Objects> {
    OBJECTS.lock()
}

macro_rules! accessors {
    ($($get:ident $get_mut:ident $kind:ident)*) => {
        $(
            #[allow(dead_code, reason = "some kinds are only read")]
            pub fn $get(&self, handle: u64) -> Outcome<&$kind> {
                match self.all.get(&handle) {
                    Some(Object::$kind(found)) => Ok(found),
                    _ => Err(INVALID_VALUE),
                }
            }
            pub fn $get_mut(&mut self, handle: u64) -> Outcome<&mut $kind> {
                match self.all.get_mut(&handle) {
                    Some(Object::$kind(found)) => Ok(found),
                    _ => Err(INVALID_VALUE),
                }
            }
        )*
    };
}

impl Objects {
    accessors! {
        desc desc_mut Desc
        layout layout_mut Layout
        preference preference_mut Preference
    }

    pub fn handle(&self, handle: u64) -> Outcome<Module> {
        match self.all.get(&handle) {
            Some(Object::Handle(module)) => Ok(*module),
            _ => Err(NOT_INITIALIZED),
        }
    }

    pub fn add(&mut self, object: Object) -> u64 {
        self.last += 0x10;
        self.all.insert(self.last, object);
        self.last
    }

    pub fn remove(&mut self, handle: u64, kind: fn(&Object) -> bool) -> Option<Object> {
        self.all.get(&handle).filter(|object| kind(object))?;
        self.all.remove(&handle)
    }

    /// What the descriptors of a product say.
    pub fn shape(&self, desc: u64, layouts: [u64; 4]) -> Outcome<Shape> {
        let [a, b, c, d] = layouts;
        let (a, b, c, d) = (*self.layout(a)?, *self.layout(b)?, *self.layout(c)?, *self.layout(d)?);
        Shape::new(*self.desc(desc)?, [a, b, c, d])
    }

    pub fn refuse(&mut self, what: u32) {
        self.refused = what;
    }

    pub fn refuses(&self, what: u32) -> bool {
        self.refused == what
    }

    pub fn count(&mut self, which: u32) -> u64 {
        match which {
            0 => std::mem::take(&mut self.counts.heuristics),
            1 => std::mem::take(&mut self.counts.products),
            2 => std::mem::replace(&mut self.counts.least_alignment, Counts::default().least_alignment),
            4 => std::mem::take(&mut self.counts.batches),
            _ => self.all.len() as u64,
        }
    }
}
