//! The table of all living objects, and the handles by which C names them.
//!
//! A handle is a key of the table: a place, and how often the place was used before. So it is told from the handle that
//! had the place earlier. The kind is in the handle's top bits, which also keeps it from being NULL.

use std::any::Any;
use std::marker::PhantomData;
use std::ops::Deref;
use std::ptr;
use std::sync::LazyLock;
use std::sync::atomic::{AtomicBool, Ordering};

use outcore::{Error, ErrorKind, Result};
use sharded_slab::{Config, Entry, Slab};

/// How a handle's 64 bits are used: 4 for the kind, 14 for the thread that made it, 23 for the place, and 23 for how
/// often the place was used.
struct Bits;

impl Config for Bits {
    const MAX_THREADS: usize = 16_384;
    const INITIAL_PAGE_SIZE: usize = 32;
    const MAX_PAGES: usize = 17;
    const RESERVED_BITS: usize = KIND_BITS as usize;
}

const KIND_BITS: u32 = 4;
const KEY_BITS: u32 = usize::BITS - KIND_BITS;

const _: () = assert!(usize::BITS == 64, "a handle needs 64 bits");

struct Object {
    value: Box<dyn Any + Send + Sync>,
    /// Its handle was closed or freed. It goes when the last call that uses it ends.
    ended: AtomicBool,
}

static OBJECTS: LazyLock<Slab<Object, Bits>> = LazyLock::new(Slab::new_with_config);

/// Names of the kinds, by the number that a handle has in its top bits.
const NAMES: [&str; 10] = [
    "NULL",
    "outcore_error",
    "outcore_runtime",
    "outcore_model",
    "outcore_tensor",
    "outcore_guard",
    "outcore_scope",
    "outcore_walker",
    "outcore_mapped",
    "outcore_text",
];

/// What C has handles of. In C the type stands for the handle's target, which is never defined there.
pub trait Kind: Any + Send + Sync + Sized {
    /// Its place among [`NAMES`]; not 0.
    const NUMBER: usize;
}

fn invalid(what: String, remedy: String) -> Error {
    Error::new(ErrorKind::InvalidArgument, what).remedy(remedy)
}

/// The key of a handle, if it can be one of this kind.
fn key<T: Kind>(handle: *const T, name: &str) -> Result<usize> {
    let (bits, wanted) = (handle.addr(), NAMES[T::NUMBER]);
    if bits == 0 {
        return Err(invalid(format!("{name} is NULL"), format!("pass a handle of an {wanted}")));
    }
    match bits >> KEY_BITS {
        kind if kind == T::NUMBER => Ok(bits & (usize::MAX >> KIND_BITS)),
        kind => {
            let found = NAMES.get(kind).filter(|_| kind > 0);
            let what = match found {
                Some(found) => format!("{name} is an {found}, not an {wanted}"),
                None => format!("{name} is no handle"),
            };
            Err(invalid(what, format!("pass a handle of an {wanted}")))
        }
    }
}

fn gone<T: Kind>(name: &str) -> Error {
    let kind = NAMES[T::NUMBER];
    invalid(
        format!("{name} is no living {kind}: it was closed or freed before, or is no handle at all"),
        "use each handle until it is closed or freed, and not afterwards".to_owned(),
    )
}

/// A handle for a new object.
///
/// # Errors
/// `OutOfMemory` if the thread has millions of handles; the object is dropped then.
pub fn keep<T: Kind>(object: T) -> Result<*mut T> {
    let object = Object { value: Box::new(object), ended: AtomicBool::new(false) };
    let key = OBJECTS.insert(object).ok_or_else(|| {
        Error::new(ErrorKind::OutOfMemory, "this thread has made more handles than a thread may have, some 4 million")
            .remedy("close or free handles that are not needed any more")
    })?;
    Ok(ptr::without_provenance_mut(key | T::NUMBER << KEY_BITS))
}

/// An object in use: it lives as long as this does, whatever other threads close.
pub struct Held<T> {
    entry: Entry<'static, Object, Bits>,
    kind: PhantomData<T>,
}

impl<T: Kind> Deref for Held<T> {
    type Target = T;

    fn deref(&self) -> &T {
        match self.entry.value.downcast_ref() {
            Some(object) => object,
            // `held` has looked, and an object keeps its type.
            None => unreachable!("an object of the table changed its type"),
        }
    }
}

/// The object that a handle names.
///
/// # Errors
/// `InvalidArgument` if the handle names none of this kind. `name` is the argument's.
pub fn held<T: Kind>(handle: *const T, name: &str) -> Result<Held<T>> {
    let entry = OBJECTS.get(key(handle, name)?).filter(|object| object.value.is::<T>());
    let living = entry.filter(|object| !object.ended.load(Ordering::Acquire));
    living.map(|entry| Held { entry, kind: PhantomData }).ok_or_else(|| gone::<T>(name))
}

/// As [`held`], and the handle names nothing any more.
///
/// # Errors
/// As for [`held`]: of several threads that close one handle, all but one are told that it was closed.
pub fn taken<T: Kind>(handle: *mut T, name: &str) -> Result<Held<T>> {
    let object = held(handle, name)?;
    if object.entry.ended.swap(true, Ordering::AcqRel) {
        return Err(gone::<T>(name));
    }
    OBJECTS.remove(object.entry.key());
    Ok(object)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::thread;

    use super::*;

    struct Thing(u64);

    impl Kind for Thing {
        const NUMBER: usize = 9;
    }

    /// An object that tells when it goes.
    struct Told(u64, Arc<AtomicBool>);

    impl Kind for Told {
        const NUMBER: usize = 8;
    }

    impl Drop for Told {
        fn drop(&mut self) {
            self.1.store(true, Ordering::Release);
        }
    }

    struct Other;

    impl Kind for Other {
        const NUMBER: usize = 3;
    }

    #[test]
    fn a_handle_of_a_place_that_is_used_again_stays_dead() {
        let mut dead = Vec::new();
        for n in 0..1000 {
            let handle = keep(Thing(n)).expect("there is room");
            assert_eq!(held(handle, "it").map(|thing| thing.0).ok(), Some(n));
            assert!(held(handle.cast::<Other>(), "it").is_err());
            assert_eq!(taken(handle, "it").map(|thing| thing.0).ok(), Some(n));
            dead.push(handle);
        }
        let _alive = keep(Thing(1)).expect("there is room");
        for handle in dead {
            assert_eq!(held(handle, "it").map(drop).map_err(|error| error.kind()), Err(ErrorKind::InvalidArgument));
            assert!(taken(handle, "it").is_err());
        }
    }

    #[test]
    fn what_is_no_handle_is_told() {
        let mut bits = 1_usize;
        for _ in 0..100_000 {
            bits = bits.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            assert!(held(ptr::without_provenance::<Other>(bits), "it").is_err());
            // Of this kind, and of places that are likely to be there.
            let near = (bits >> 20 & 0xff) | Other::NUMBER << KEY_BITS;
            assert!(held(ptr::without_provenance::<Other>(near), "it").is_err());
        }
        assert!(held(ptr::null::<Other>(), "it").is_err());
        assert!(held(ptr::without_provenance::<Other>(usize::MAX), "it").is_err());
    }

    #[test]
    fn an_object_lives_while_a_thread_uses_it() {
        let dropped = Arc::new(AtomicBool::new(false));
        let handle = keep(Told(7, dropped.clone())).expect("there is room").expose_provenance();
        let used = held(ptr::with_exposed_provenance::<Told>(handle), "it").expect("it lives");
        let free = || taken(ptr::with_exposed_provenance_mut::<Told>(handle), "it").map(drop).is_ok();
        let freed = thread::scope(|scope| {
            let threads: Vec<_> = (0..8).map(|_| scope.spawn(free)).collect();
            threads.into_iter().filter_map(|thread| thread.join().ok()).filter(|freed| *freed).count()
        });
        assert_eq!((freed, used.0), (1, 7));
        assert!(!dropped.load(Ordering::Acquire));
        drop(used);
        assert!(dropped.load(Ordering::Acquire));
    }
}
