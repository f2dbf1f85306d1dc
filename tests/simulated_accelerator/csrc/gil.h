// Waiting without Python's lock: the threads of a stream, and other threads of the program, go on meanwhile.
#pragma once

#include <Python.h>

namespace sim {

// Lets go of Python's lock for its lifetime, if this thread has it.
class WithoutGil {
 public:
  WithoutGil() {
    if (Py_IsInitialized() && PyGILState_Check()) state_ = PyEval_SaveThread();
  }
  ~WithoutGil() {
    if (state_ != nullptr) PyEval_RestoreThread(state_);
  }
  WithoutGil(const WithoutGil&) = delete;
  WithoutGil& operator=(const WithoutGil&) = delete;

 private:
  PyThreadState* state_ = nullptr;
};

}  // namespace sim
