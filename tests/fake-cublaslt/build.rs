//! Names the library `libcublasLt.so` to the dynamic linker, so that a process which has loaded it by path gets it
//! again from `dlopen("libcublasLt.so")`.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libcublasLt.so");
}
