// Memory of a Python array as C++ sees it, by DLPack or by __cuda_array_interface__.
//
// Both protocols hand over a pointer, a shape and strides, and both say on which stream the memory
// is ready. Nothing is copied, and the Python object is kept alive while a View lives.

#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace py = pybind11;

namespace views {

// The ABI of DLPack before its version 1: what a capsule named "dltensor" points to.
// https://dmlc.github.io/dlpack/latest/c_api.html
struct DLDevice { int32_t device_type; int32_t device_id; };
struct DLDataType { uint8_t code; uint8_t bits; uint16_t lanes; };
struct DLTensor {
    void* data;
    DLDevice device;
    int32_t ndim;
    DLDataType dtype;
    int64_t* shape;
    int64_t* strides;  // in elements; null is C order
    uint64_t byte_offset;
};
struct DLManagedTensor {
    DLTensor dl_tensor;
    void* manager_ctx;
    void (*deleter)(DLManagedTensor*);
};

constexpr int32_t CPU = 1;
constexpr int32_t CUDA = 2;

template <typename T>
constexpr uint8_t dl_code() {
    return std::is_floating_point_v<T> ? 2 : std::is_signed_v<T> ? 0 : 1;
}

// An array in C order, of elements T.
template <typename T>
struct View {
    T* data = nullptr;
    std::vector<int64_t> shape;
    int32_t device_type = CPU;
    int64_t stream = 0;  // of __cuda_array_interface__: where the memory is ready; 0 is nowhere
    py::object owner;

    int64_t size() const {
        int64_t n = 1;
        for (int64_t extent : shape) n *= extent;
        return n;
    }

    void expect(size_t ndim, const char* name) const {
        if (shape.size() != ndim)
            throw std::invalid_argument(std::string(name) + " must have " + std::to_string(ndim) +
                                        " axes, and has " + std::to_string(shape.size()));
    }
};

inline void expect_c_order(const std::vector<int64_t>& shape, const std::vector<int64_t>& strides,
                           int64_t unit) {
    int64_t step = unit;
    for (size_t axis = shape.size(); axis-- > 0; step *= shape[axis])
        if (shape[axis] > 1 && strides[axis] != step)
            throw std::invalid_argument("an array in C order is wanted");
}

// By DLPack. `stream` is the one that will read or write: the producer makes it wait for whatever
// still has to be done on the memory. Unused, and none, for the host's.
template <typename T>
View<T> from_dlpack(const py::object& array, int32_t device_type, int64_t stream) {
    auto device = array.attr("__dlpack_device__")().cast<std::pair<int32_t, int32_t>>();
    if (device.first != device_type)
        throw std::invalid_argument("the array is on DLPack device type " +
                                    std::to_string(device.first) + ", not " +
                                    std::to_string(device_type));
    py::object capsule = device_type == CUDA ? array.attr("__dlpack__")(py::arg("stream") = stream)
                                             : array.attr("__dlpack__")();
    auto* managed =
        static_cast<DLManagedTensor*>(PyCapsule_GetPointer(capsule.ptr(), "dltensor"));
    if (managed == nullptr) throw py::error_already_set();
    const DLTensor& tensor = managed->dl_tensor;
    if (tensor.dtype.code != dl_code<T>() || tensor.dtype.bits != 8 * sizeof(T) ||
        tensor.dtype.lanes != 1)
        throw std::invalid_argument("the array has another dtype");
    View<T> view;
    view.shape.assign(tensor.shape, tensor.shape + tensor.ndim);
    if (tensor.strides != nullptr)
        expect_c_order(view.shape, {tensor.strides, tensor.strides + tensor.ndim}, 1);
    view.data = reinterpret_cast<T*>(static_cast<char*>(tensor.data) + tensor.byte_offset);
    view.device_type = device_type;
    // The capsule is not consumed: it frees its tensor itself when the view lets go of it.
    view.owner = capsule;
    return view;
}

// By __cuda_array_interface__, version 3. Who launches a kernel on another stream than `stream` has
// to have it wait for that one.
template <typename T>
View<T> from_cuda_array_interface(const py::object& array) {
    auto interface = array.attr("__cuda_array_interface__").cast<py::dict>();
    auto typestr = interface["typestr"].cast<std::string>();
    const char* kind = dl_code<T>() == 2 ? "f" : dl_code<T>() == 0 ? "i" : "u";
    if (typestr != "<" + std::string(kind) + std::to_string(sizeof(T)))
        throw std::invalid_argument("the array has dtype " + typestr);
    View<T> view;
    for (py::handle extent : interface["shape"].cast<py::tuple>())
        view.shape.push_back(extent.cast<int64_t>());
    if (interface.contains("strides") && !interface["strides"].is_none()) {
        std::vector<int64_t> strides;
        for (py::handle stride : interface["strides"].cast<py::tuple>())
            strides.push_back(stride.cast<int64_t>());
        expect_c_order(view.shape, strides, sizeof(T));
    }
    auto data = interface["data"].cast<std::pair<uintptr_t, bool>>();
    view.data = reinterpret_cast<T*>(data.first);
    view.device_type = CUDA;
    if (interface.contains("stream") && !interface["stream"].is_none())
        view.stream = interface["stream"].cast<int64_t>();
    view.owner = array;
    return view;
}

}  // namespace views
