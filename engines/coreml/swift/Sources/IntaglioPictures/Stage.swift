#if canImport(CoreML)
import CoreML
import Foundation
import PictureMath

/// A loaded stage: one function of a package in Core ML. It leaves memory when the last reference to it does.
final class Stage {
    private let name: String
    private let function: PictureSettings.Function
    private let model: MLModel

    /// Loads the function that was made for these sizes of named dims. Core ML compiles the package first, which takes up
    /// to minutes; the compiled copy is kept in the user's caches.
    init(
        _ name: String, of settings: PictureSettings, beside folder: URL, sizes: [String: Int], computeUnits: MLComputeUnits
    ) async throws {
        guard let stage = settings.stages[name] else {
            throw PictureError("picture.json has no stage \(name); compile the bundle again")
        }
        guard let function = stage.functions.first(where: { $0.allows(sizes) }) else {
            throw PictureError("\(name) was not compiled for \(sizes); see `intaglio compile --shapes`")
        }
        let configuration = MLModelConfiguration()
        configuration.computeUnits = computeUnits
        if let functionName = function.name {
            configuration.functionName = functionName
        }
        let compiled = try await compiledCopy(of: folder.appendingPathComponent(stage.package).standardizedFileURL)
        self.name = name
        self.function = function
        model = try await MLModel.load(contentsOf: compiled, configuration: configuration)
    }

    /// Runs it and gives one output, as floats. Throws for values that are not finite.
    func run(_ feeds: [String: Tensor], output: String) async throws -> Tensor {
        var values: [String: MLFeatureValue] = [:]
        for (input, tensor) in feeds {
            guard let packageName = function.inputs[input],
                let constraint = model.modelDescription.inputDescriptionsByName[packageName]?.multiArrayConstraint
            else {
                throw PictureError("\(name) has no input \(input), only \(function.inputs.keys.sorted())")
            }
            values[packageName] = MLFeatureValue(multiArray: try multiArray(tensor, of: constraint.dataType, for: input))
        }
        let made = try await model.prediction(from: MLDictionaryFeatureProvider(dictionary: values))
        guard let packageName = function.outputs[output], let array = made.featureValue(for: packageName)?.multiArrayValue
        else {
            throw PictureError("\(name) gave no \(output), only \(made.featureNames.sorted())")
        }
        // An array's rows may lie apart in memory; a shaped array counts that in.
        let floats = MLShapedArray<Float>(converting: array).scalars
        guard floats.allSatisfy(\.isFinite) else {
            throw PictureError("\(output) of \(name) is not finite; compile in float32, or choose other compute units")
        }
        return Tensor(floats, array.shape.map(\.intValue))
    }

    private func multiArray(_ tensor: Tensor, of type: MLMultiArrayDataType, for input: String) throws -> MLMultiArray {
        switch (tensor.values, type) {
        case (.integers(let integers), .int32):
            return MLMultiArray(MLShapedArray<Int32>(scalars: integers, shape: tensor.shape))
        case (.floats(let floats), .float32):
            return MLMultiArray(MLShapedArray<Float>(scalars: floats, shape: tensor.shape))
        #if arch(arm64)
        case (.floats(let floats), .float16):
            return MLMultiArray(MLShapedArray<Float16>(scalars: floats.map { Float16($0) }, shape: tensor.shape))
        #endif
        default:
            throw PictureError("\(name) takes \(input) in a type that is not known here (\(type.rawValue))")
        }
    }
}

/// The compiled form of a package. Its name holds the package's identifier, so that one of another is never taken.
private func compiledCopy(of package: URL) async throws -> URL {
    struct Manifest: Decodable {
        let rootModelIdentifier: String
    }
    let manifest = try JSONDecoder().decode(
        Manifest.self, from: Data(contentsOf: package.appendingPathComponent("Manifest.json"))
    )
    let files = FileManager.default
    let caches = try files.url(for: .cachesDirectory, in: .userDomainMask, appropriateFor: nil, create: true)
        .appendingPathComponent("intaglio", isDirectory: true)
    try files.createDirectory(at: caches, withIntermediateDirectories: true)
    let name = "\(package.deletingPathExtension().lastPathComponent)-\(manifest.rootModelIdentifier).mlmodelc"
    let kept = caches.appendingPathComponent(name, isDirectory: true)
    if !files.fileExists(atPath: kept.path) {
        let made = try await MLModel.compileModel(at: package)
        try files.moveItem(at: made, to: kept)
    }
    return kept
}
#endif
