// Partial updates on a GPU, on whatever gives __cuda_array_interface__ or DLPack.

#include "views.hpp"

#include "kernels.cuh"

#include <cuda_runtime.h>

namespace {

using views::View;

void check(cudaError_t error, const char* what) {
    if (error != cudaSuccess)
        throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(error));
}

// What a stream does from now on comes after what another has been given to do.
void wait_for(cudaStream_t stream, int64_t other) {
    auto theirs = reinterpret_cast<cudaStream_t>(other);
    if (other == 0 || theirs == stream) return;
    cudaEvent_t event;
    check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "cudaEventCreate");
    check(cudaEventRecord(event, theirs), "cudaEventRecord");
    check(cudaStreamWaitEvent(stream, event, 0), "cudaStreamWaitEvent");
    check(cudaEventDestroy(event), "cudaEventDestroy");
}

template <typename T>
View<T> view_of(const py::object& array, const std::string& protocol, int64_t stream) {
    if (protocol == "dlpack") return views::from_dlpack<T>(array, views::CUDA, stream);
    if (protocol != "cuda_array_interface")
        throw std::invalid_argument("protocol must be 'dlpack' or 'cuda_array_interface'");
    auto view = views::from_cuda_array_interface<T>(array);
    wait_for(reinterpret_cast<cudaStream_t>(stream), view.stream);
    return view;
}

// Returns at once. The arrays must live until `stream` is done with them, as for any kernel.
void launch(const py::object& object_, const py::object& images_, const py::object& places_,
            const py::object& update_, const py::object& weight_, int64_t stream,
            const std::string& protocol) {
    auto object = view_of<float>(object_, protocol, stream);
    auto images = view_of<float>(images_, protocol, stream);
    auto places = view_of<int32_t>(places_, protocol, stream);
    auto update = view_of<float>(update_, protocol, stream);
    auto weight = view_of<float>(weight_, protocol, stream);
    object.expect(2, "object");
    images.expect(3, "images");
    places.expect(2, "places");
    if (update.shape != object.shape || weight.shape != object.shape ||
        places.shape != std::vector<int64_t>{images.shape[0], 2})
        throw std::invalid_argument("shapes do not belong together");
    partial_update<<<256, 256, 0, reinterpret_cast<cudaStream_t>(stream)>>>(
        object.data, object.shape[0], object.shape[1], images.data, images.shape[0],
        images.shape[1], images.shape[2], places.data, update.data, weight.data);
    check(cudaGetLastError(), "partial_update");
}

}  // namespace

PYBIND11_MODULE(reconstruct_cuda, module) {
    module.def("partial_update", &launch, py::arg("object"), py::arg("images"),
               py::arg("places"), py::arg("update"), py::arg("weight"), py::arg("stream") = 1,
               py::arg("protocol") = "cuda_array_interface");
}
