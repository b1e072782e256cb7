//! What a caller in C lends for the time of a call: text, arrays, and places for results.

use std::ffi::{CStr, OsStr, c_char};
use std::mem::{self, MaybeUninit};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::{ptr, slice};

use outcore::{Error, ErrorKind, Result};

use crate::handles::{Kind, keep};

/// `name` may not be NULL.
pub fn null(name: &str) -> Error {
    Error::new(ErrorKind::InvalidArgument, format!("{name} is NULL")).remedy("see the function's comment in outcore.h")
}

/// A place for a result, or NULL. It may be written for as long as this lives: whoever makes one promises that.
pub struct Out<T>(*mut T);

impl<T> Out<T> {
    /// # Safety
    /// `place` is NULL, or may be written until the call that it was given to returns.
    pub unsafe fn new(place: *mut T) -> Self {
        Self(place)
    }

    /// Writes the result. Where there is no place for it, nothing happens.
    pub fn put(&self, value: T) {
        if !self.0.is_null() {
            // SAFETY: whoever called `new` keeps the place writable as long as this lives.
            unsafe { self.0.write(value) };
        }
    }
}

impl<T: Kind> Out<*mut T> {
    /// A place for a handle, which is NULL from now on: what fails leaves no handle that means something.
    ///
    /// # Safety
    /// As for [`new`](Self::new).
    pub unsafe fn handle(place: *mut *mut T) -> Self {
        // SAFETY: the same promise.
        let place = unsafe { Self::new(place) };
        place.put(ptr::null_mut());
        place
    }

    /// Makes a handle and writes it.
    ///
    /// # Errors
    /// `InvalidArgument` if there is no place for it: the object is dropped then.
    pub fn give(&self, name: &str, object: T) -> Result<()> {
        if self.0.is_null() {
            return Err(null(name));
        }
        self.put(keep(object)?);
        Ok(())
    }
}

/// Text that the caller lends, or `None` for NULL.
///
/// # Safety
/// `text` is NULL, or points to bytes that end with a zero and do not change while the result lives.
pub unsafe fn text<'a>(text: *const c_char, name: &str) -> Result<Option<&'a str>> {
    if text.is_null() {
        return Ok(None);
    }
    // SAFETY: not NULL, and ends with a zero, as the caller promises.
    let text = unsafe { CStr::from_ptr(text) };
    text.to_str().map(Some).map_err(|cause| {
        Error::new(ErrorKind::InvalidArgument, format!("{name} is not UTF-8")).caused_by(cause).remedy("encode it so")
    })
}

/// A path that the caller lends, or `None` for NULL. Its bytes need not be UTF-8.
///
/// # Safety
/// As for [`text`].
pub unsafe fn path<'a>(path: *const c_char) -> Option<&'a Path> {
    if path.is_null() {
        return None;
    }
    // SAFETY: not NULL, and ends with a zero, as the caller promises.
    let path = unsafe { CStr::from_ptr(path) };
    Some(Path::new(OsStr::from_bytes(path.to_bytes())))
}

/// An array that the caller lends; NULL is one, if it has no elements.
///
/// # Safety
/// `first` is NULL, or there are `count` elements from there on that do not change while the result lives.
pub unsafe fn array<'a, T>(first: *const T, count: usize, name: &str) -> Result<&'a [T]> {
    if count == 0 {
        return Ok(&[]);
    }
    if first.is_null() {
        return Err(null(name));
    }
    if !first.is_aligned() || count > isize::MAX as usize / size_of::<T>().max(1) {
        let message = format!("{name} cannot be an array of {count} elements at {first:p}");
        return Err(Error::new(ErrorKind::InvalidArgument, message).remedy("pass an array, and how many it has"));
    }
    // SAFETY: aligned and no larger than memory; the caller promises the rest.
    Ok(unsafe { slice::from_raw_parts(first, count) })
}

/// A structure that may get more fields at its end. Its first field is `size`: how many bytes the caller's has.
///
/// # Safety
/// It has the layout of C, its first field is a `usize`, and any of its fields may be zeros, or what C put there.
pub unsafe trait Extensible: Copy {
    /// What it is called in C.
    const NAME: &'static str;
}

/// No structure of a caller is larger: more is no size but bytes that were never set.
const SIZE_MOST: usize = 4096;

/// # Safety
/// `place` is NULL, or points to a `size_t` that may be read.
unsafe fn size_of_theirs<T: Extensible>(place: *const T, name: &str) -> Result<usize> {
    if place.is_null() {
        return Err(null(name));
    }
    // SAFETY: not NULL; the first field is the size (the contract of `Extensible`). It need not be aligned.
    let size = unsafe { place.cast::<usize>().read_unaligned() };
    if (size_of::<usize>()..=SIZE_MOST).contains(&size) {
        return Ok(size);
    }
    let message = format!("the field size of {name} is {size}, which is no size of an {}", T::NAME);
    Err(Error::new(ErrorKind::InvalidArgument, message).remedy(format!("set it to sizeof({})", T::NAME)))
}

/// Reads a structure; what the caller's does not have is zero.
///
/// # Errors
/// `InvalidArgument` if its size is none; `Unsupported` if it has fields that this library does not have, and they are
/// set.
///
/// # Safety
/// `place` is NULL, or points to as many bytes as its field `size` says.
pub unsafe fn read<T: Extensible>(place: *const T, name: &str) -> Result<T> {
    // SAFETY: the same promise.
    let size = unsafe { size_of_theirs(place, name)? };
    let (bytes, ours) = (place.cast::<u8>(), size_of::<T>());
    let mut value = MaybeUninit::<T>::zeroed();
    // SAFETY: the caller's has `size` bytes, ours as many as it has; no more than either are copied.
    unsafe { ptr::copy_nonoverlapping(bytes, value.as_mut_ptr().cast(), size.min(ours)) };
    // SAFETY: behind ours there are `size - ours` bytes of the caller's.
    if (ours..size).any(|at| unsafe { bytes.add(at).read() } != 0) {
        let message = format!("{name} has {size} bytes, of which this library knows {ours}, and others are set");
        return Err(Error::new(ErrorKind::Unsupported, message)
            .remedy("use a library that is as new as the header, or leave new fields zero"));
    }
    // SAFETY: zeros, or what C put there, are a value (the contract of `Extensible`).
    Ok(unsafe { value.assume_init() })
}

/// Writes a structure, as much of it as the caller's has. The field `size` stays the caller's; what this library does
/// not have becomes zero.
///
/// # Errors
/// `InvalidArgument` if its size is none.
///
/// # Safety
/// `place` is NULL, or points to as many bytes that may be written as its field `size` says.
pub unsafe fn write<T: Extensible>(place: *mut T, name: &str, value: &T) -> Result<()> {
    // SAFETY: the same promise.
    let size = unsafe { size_of_theirs(place, name)? };
    let (to, from, head) = (place.cast::<u8>(), ptr::from_ref(value).cast::<u8>(), size_of::<usize>());
    let filled = size.min(mem::size_of::<T>());
    // SAFETY: both have `filled` bytes, and `head` is not more.
    unsafe { ptr::copy_nonoverlapping(from.add(head), to.add(head), filled - head) };
    // SAFETY: the caller's has `size` bytes.
    unsafe { ptr::write_bytes(to.add(filled), 0, size - filled) };
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[repr(C)]
    #[derive(Clone, Copy, Debug, PartialEq)]
    struct Older {
        size: usize,
        one: u64,
    }

    #[repr(C)]
    #[derive(Clone, Copy, Debug, PartialEq)]
    struct Ours {
        size: usize,
        one: u64,
        two: u64,
    }

    #[repr(C)]
    #[derive(Clone, Copy, Debug, PartialEq)]
    struct Newer {
        size: usize,
        one: u64,
        two: u64,
        three: u64,
    }

    // SAFETY: `repr(C)`, `size` comes first, and all fields are numbers.
    unsafe impl Extensible for Ours {
        const NAME: &'static str = "ours";
    }

    #[test]
    fn structures_of_older_and_newer_headers_are_read() {
        let read = |place: *const Ours| {
            // SAFETY: all places below are structures of the size that they say.
            unsafe { super::read(place, "it") }.map_err(|error| error.kind())
        };
        let older = Older { size: size_of::<Older>(), one: 5 };
        assert_eq!(read((&raw const older).cast()), Ok(Ours { size: 16, one: 5, two: 0 }));
        let mut newer = Newer { size: size_of::<Newer>(), one: 5, two: 6, three: 0 };
        assert_eq!(read((&raw const newer).cast()), Ok(Ours { size: 32, one: 5, two: 6 }));
        newer.three = 1;
        assert_eq!(read((&raw const newer).cast()), Err(ErrorKind::Unsupported));
        for size in [0, 7, SIZE_MOST + 1, usize::MAX] {
            assert_eq!(read(&Ours { size, one: 5, two: 6 }), Err(ErrorKind::InvalidArgument));
        }
        assert_eq!(read(ptr::null()), Err(ErrorKind::InvalidArgument));
    }

    #[test]
    fn structures_of_older_and_newer_headers_are_written() {
        let value = Ours { size: size_of::<Ours>(), one: 1, two: 2 };
        let mut theirs = [Newer { size: size_of::<Older>(), one: 7, two: 7, three: 7 }; 2];
        theirs[1].size = size_of::<Newer>();
        for place in &mut theirs {
            // SAFETY: each has the bytes that it says, or more.
            unsafe { write(ptr::from_mut(place).cast(), "it", &value) }.expect("its size is one");
        }
        assert_eq!(theirs[0], Newer { size: 16, one: 1, two: 7, three: 7 });
        assert_eq!(theirs[1], Newer { size: 32, one: 1, two: 2, three: 0 });
    }
}
