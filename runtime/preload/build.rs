//! Has Rust's standard library call a function of the library in the place of the C library's: see `memory.rs`.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    // Zig, which links wheels, knows no `--defsym`.
    println!("cargo:rustc-cdylib-link-arg=-Wl,--wrap=__cxa_thread_atexit_impl");
}
