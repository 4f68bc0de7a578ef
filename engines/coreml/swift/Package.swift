// swift-tools-version: 5.9
import PackageDescription

let package = Package(
    name: "IntaglioPictures",
    platforms: [.macOS("15.0"), .iOS("18.0")],
    products: [
        .library(name: "IntaglioPictures", targets: ["IntaglioPictures"]),
        .executable(name: "paint", targets: ["paint"]),
    ],
    dependencies: [
        .package(url: "https://github.com/huggingface/swift-transformers", from: "1.3.0")
    ],
    targets: [
        .target(name: "PictureMath"),
        .target(
            name: "IntaglioPictures",
            dependencies: [
                "PictureMath",
                .product(name: "Hub", package: "swift-transformers"),
                .product(name: "Tokenizers", package: "swift-transformers"),
            ]
        ),
        .executableTarget(name: "paint", dependencies: ["IntaglioPictures"]),
        .testTarget(name: "PictureMathTests", dependencies: ["PictureMath"], resources: [.copy("golden.json")]),
    ]
)
