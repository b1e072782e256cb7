// What a library of kernels gives the driver and the tests; its TABLE comes before.
#define EXPORT extern "C" __attribute__((visibility("default")))

// Gives the emulated driver all kernels; false where it is not loaded.
EXPORT bool emulated_kernels_register() {
    using namespace emulation;
    typedef bool (*Register)(const char *, Declare, Run, size_t);
    Register add_kernel = (Register)dlsym(RTLD_DEFAULT, "fakecuda_register_kernel");
    declare_range = (decltype(declare_range))dlsym(RTLD_DEFAULT, "fakecuda_declare");
    pointer_to = (decltype(pointer_to))dlsym(RTLD_DEFAULT, "fakecuda_pointer");
    touch = (decltype(touch))dlsym(RTLD_DEFAULT, "fakecuda_touch");
    if (add_kernel == nullptr || declare_range == nullptr || pointer_to == nullptr || touch == nullptr) {
        return false;
    }
    for (const Row &row : TABLE) {
        add_kernel(row.name, row.declare, row.run, 0);
    }
    return true;
}

// What the driver reads of a module: a PTX text with the kernels' names and the sizes of their parameters.
EXPORT const char *emulated_kernels_ptx() {
    static const std::string text = [] {
        std::string all = ".version 9.0\n.target sm_80\n.address_size 64\n";
        for (const emulation::Row &row : emulation::TABLE) {
            all += std::string(".visible .entry ") + row.name + "(" + row.sizes() + ")\n{\n\tret;\n}\n";
        }
        return all;
    }();
    return text.c_str();
}

// The kernels that have run, a line each.
EXPORT const char *emulated_kernels_that_ran() {
    static std::string text;
    text.clear();
    for (const emulation::Row &row : emulation::TABLE) {
        if (*row.ran) {
            text += std::string(row.name) + "\n";
        }
    }
    return text.c_str();
}

// A program that is run with this library preloaded need not know of it.
__attribute__((constructor)) static void at_load() {
    emulated_kernels_register();
}
