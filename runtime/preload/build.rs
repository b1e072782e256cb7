//! Gives a function of the library the name by which Rust's standard library calls it: see `memory.rs`.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rustc-cdylib-link-arg=-Wl,--defsym=__cxa_thread_atexit_impl=outcore_at_thread_exit");
}
